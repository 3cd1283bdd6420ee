"""The cut that is chosen, of several numbers of micro-batches."""

from dataclasses import replace

import pytest

from paceline.partition.cuts import best_cut, fastest_cut
from paceline.partition.graph import WorkGraph, chain
from paceline.partition.pipeline import Pipeline, workers

CORES = float("inf")
PIPELINE = Pipeline(workers=workers(2), schedule="gpipe")


def layers(seconds: float) -> WorkGraph:
    return chain("abcd", seconds=[seconds] * 4, num_bytes=0, parameter_bytes=8)


def test_the_number_with_the_shortest_step_is_taken() -> None:
    found = fastest_cut([(2, layers(1.0)), (4, layers(0.5))], PIPELINE, CORES)
    assert found.micro_batches == 4
    slow = fastest_cut([(2, layers(1.0)), (4, layers(0.9))], PIPELINE, CORES)
    assert slow.micro_batches == 2
    assert slow.seconds == pytest.approx(slow.placement.step_s)


def test_every_worker_has_something_to_train() -> None:
    """Three operations that take all the time, and have no parameters, behind two layers."""
    graph = chain("abcde", seconds=[0.1, 0.1, 1.0, 1.0, 1.0], num_bytes=0, parameter_bytes=8)
    bare = [replace(one, parameter_bytes=0, num_layers=0) for one in graph.nodes[2:]]
    graph = replace(graph, nodes=(*graph.nodes[:2], *bare))
    setting = replace(PIPELINE, micro_batches=2)
    assert any(not one.parameter_bytes for one in best_cut(graph, setting, CORES).placement.parts)
    cut = fastest_cut([(2, graph)], PIPELINE, CORES).placement
    assert all(one.parameter_bytes for one in cut.parts)
