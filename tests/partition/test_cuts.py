"""The cut that is chosen, of several numbers of micro-batches."""

from dataclasses import replace

import pytest

from paceline.partition.cuts import best_cut, fastest_cut
from paceline.partition.graph import WorkEdge, WorkGraph, WorkNode, chain
from paceline.partition.pipeline import Pipeline, workers
from paceline.partition.placement import pipeline_step, place
from paceline.partition.search import find_placement

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


def test_where_that_does_not_fit_the_memory_somebody_has_nothing() -> None:
    """Two layers that each fill a worker, and two operations without parameters behind them."""
    graph = chain("abcd", seconds=[1.0, 1.0, 0.1, 0.1], num_bytes=0, parameter_bytes=8)
    bare = [replace(one, parameter_bytes=0, num_layers=0) for one in graph.nodes[2:]]
    graph = replace(graph, nodes=(*graph.nodes[:2], *bare))
    roomy = Pipeline(workers=workers(3), micro_batches=2)
    held = fastest_cut([(2, graph)], roomy, CORES).placement.memory_bytes
    alone = place(graph, roomy, [0, 1, 2, 2]).memory_bytes
    assert alone < held
    tight = Pipeline(workers=workers(3, memory_bytes=alone), micro_batches=2)
    found = fastest_cut([(2, graph)], tight, CORES).placement
    assert found.memory_bytes <= alone


def test_what_the_first_micro_batch_takes_longer_counts_once_an_update() -> None:
    nodes = tuple(
        WorkNode(name=name, forward_s=1.0, first_s=first_s)
        for name, first_s in zip("abcd", (0.0, 0.0, 8.0, 8.0), strict=True)
    )
    edges = tuple(WorkEdge(name=f"e{i}", source=i, targets=(i + 1,), num_bytes=1) for i in range(4))
    graph = WorkGraph(nodes=nodes, edges=edges)
    assert graph.work_s == 4.0
    assert graph.alone_s == 20.0
    for micro_batches, wanted in ((1, (1.0, 1.0, 9.0, 9.0)), (8, (1.0, 1.0, 2.0, 2.0))):
        pipeline = Pipeline(workers=workers(4), micro_batches=micro_batches)
        assert place(graph, pipeline, [0, 1, 2, 3]).loads_s == pytest.approx(wanted)
    few = Pipeline(workers=workers(2), micro_batches=2)
    assert [len(one.nodes) for one in find_placement(graph, few).placement.parts] == [3, 1]


def test_a_worker_of_several_parts_is_busy_with_all_of_them() -> None:
    graph = chain("abcd", seconds=[1.0, 2.0, 3.0, 2.0], num_bytes=0)
    pipeline = Pipeline(workers=workers(4), micro_batches=4, schedule="interleaved", parts_each=2)
    cut = place(graph, pipeline, [0, 1, 2, 3])
    assert pipeline.num_workers == 2
    assert cut.balance_of(2) == 1.0
    assert cut.balance == pytest.approx(2.0 / 3.0)
    assert pipeline_step(cut, pipeline, 2.0).num_ranks == 2
