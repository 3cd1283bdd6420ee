"""Work graphs and given cuts of them."""

import pytest

from paceline.collectives.base import LinkCost
from paceline.errors import ConfigError
from paceline.partition.graph import INPUT, TiedParameter, WorkEdge, WorkGraph, WorkNode, chain
from paceline.partition.pipeline import Pipeline, workers
from paceline.partition.placement import even_cut, even_parts, place

NODES = tuple(WorkNode(name=name, forward_s=1.0, parameter_bytes=10) for name in "abc")


def test_edges_must_lead_to_later_nodes() -> None:
    for edge in (
        WorkEdge(name="e", source=1, targets=(0,), num_bytes=1),
        WorkEdge(name="e", source=2, targets=(4,), num_bytes=1),
    ):
        with pytest.raises(ConfigError, match="number nodes in the order"):
            WorkGraph(nodes=NODES, edges=(edge,))
    with pytest.raises(ConfigError, match="without operations"):
        WorkGraph(nodes=())


def test_edges_crossing_a_border_are_live() -> None:
    edges = (
        WorkEdge(name="x", source=INPUT, targets=(0, 2), num_bytes=1),
        WorkEdge(name="a", source=0, targets=(1,), num_bytes=2),
        WorkEdge(name="b", source=1, targets=(2, 3), num_bytes=3),
    )
    graph = WorkGraph(nodes=NODES, edges=edges)
    live = [[one.name for one in graph.crossing(border)] for border in (0, 0b1, 0b11, 0b111)]
    assert live == [[], ["x", "a"], ["x", "b"], []]


def test_costs_are_interpolated_linearly_in_the_batch_size() -> None:
    small = chain("ab", seconds=[1.0, 2.0], num_bytes=10)
    large = chain("ab", seconds=[5.0, 2.0], num_bytes=50)
    result = small.at(3, 1, large, 5)
    assert [node.work_s for node in result.nodes] == pytest.approx([3.0, 2.0])
    assert [edge.num_bytes for edge in result.edges] == [30, 30, 30]
    assert small.at(0.5, 1, large, 5).nodes[0].work_s == pytest.approx(0.5)


def test_even_cut_counts_layers_with_parameters() -> None:
    nodes = tuple(WorkNode(name=f"n{i}", num_layers=int(i % 2 == 0)) for i in range(8))
    assert even_parts(WorkGraph(nodes=nodes), 2) == (0, 0, 0, 0, 1, 1, 1, 1)
    assert even_parts(WorkGraph(nodes=nodes), 6) == (0, 0, 1, 1, 2, 3, 4, 5)


def test_tied_parameter_across_parts_is_held_twice_and_summed() -> None:
    tie = TiedParameter(name="w", num_bytes=100, nodes=(0, 2))
    graph = WorkGraph(nodes=NODES, ties=(tie,))
    pipeline = Pipeline(
        workers=workers(3), link=LinkCost(latency_s=0.0, s_per_byte=0.01), micro_batches=4
    )
    result = place(graph, pipeline, (0, 1, 2))
    assert [part.parameter_bytes for part in result.parts] == [110, 10, 110]
    assert [part.cut_ties for part in result.parts] == [("w",), (), ("w",)]
    assert result.loads_s == pytest.approx((1.5, 1.0, 1.5))  # 2 x 100 x 0.01 s over 4 micro-batches
    assert graph.parameter_bytes == 130


def test_part_memory_is_parameters_state_and_live_micro_batches() -> None:
    nodes = tuple(
        WorkNode(name=name, parameter_bytes=10, activation_bytes=100, buffer_bytes=1)
        for name in "ab"
    )
    edge = WorkEdge(name="e", source=0, targets=(1,), num_bytes=7, gradient_bytes=7)
    graph = WorkGraph(nodes=nodes, edges=(edge,))
    for schedule, live in (("gpipe", (8, 8)), ("1f1b", (2, 1))):
        pipeline = Pipeline(workers=workers(2), micro_batches=8, schedule=schedule, state_copies=2)
        actual = even_cut(graph, pipeline)
        expected = [40 + 1 + live[0] * 100, 40 + 1 + live[1] * 100 + 8 * 7]
        assert [part.memory_bytes for part in actual.parts] == expected


def test_part_memory_includes_its_largest_late_gradient() -> None:
    nodes = tuple(
        WorkNode(name=str(num), parameter_bytes=num, late_bytes=late)
        for num, late in ((1000, 0), (10, 1), (30, 1), (20, 1))
    )
    pipeline = Pipeline(workers=workers(2), micro_batches=1)
    actual = place(WorkGraph(nodes=nodes, edges=()), pipeline, (0, 0, 1, 1))
    assert [part.memory_bytes for part in actual.parts] == [2 * 1010 + 10, 2 * 50 + 30]


def test_invalid_cut_is_refused() -> None:
    edge = WorkEdge(name="e", source=0, targets=(1,), num_bytes=7)
    graph = WorkGraph(nodes=NODES, edges=(edge,))
    pipeline = Pipeline(workers=workers(2))
    with pytest.raises(ConfigError, match="e leads back to an earlier part"):
        place(graph, pipeline, (1, 0, 0))
    with pytest.raises(ConfigError, match="needs a part for each of 3 nodes"):
        place(graph, pipeline, (0, 0, 0))
    with pytest.raises(ConfigError, match="--speeds needs one for each of 3 workers, got 2"):
        workers(3, speeds=(1.0, 0.5))
    with pytest.raises(ConfigError, match="unknown schedule 'zigzag'"):
        Pipeline(workers=workers(2), schedule="zigzag")
