"""The cut chosen from several numbers of micro-batches."""

from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.partition.cuts import MicroBatches, best_cut, fastest_cut
from paceline.partition.graph import WorkEdge, WorkGraph, WorkNode, chain
from paceline.partition.pipeline import ALIKE, Pipeline, micro_batch_shares, workers
from paceline.partition.placement import pipeline_step, place
from paceline.partition.search import find_placement

CORES = float("inf")
PIPELINE = Pipeline(workers=workers(2), schedule="gpipe")
ONE_BACK = replace(PIPELINE, schedule="1f1b")


def layers(seconds: float) -> WorkGraph:
    return chain("abcd", seconds=[seconds] * 4, num_bytes=0, parameter_bytes=8)


def micro_batches_of(graphs: dict[int, WorkGraph]) -> list[MicroBatches]:
    """Numbers of equal micro-batches."""
    return [MicroBatches(num, graph) for num, graph in graphs.items()]


def test_number_of_micro_batches_with_the_shortest_step_is_chosen() -> None:
    result = fastest_cut(micro_batches_of({2: layers(1.0), 4: layers(0.5)}), PIPELINE, CORES)
    assert result.micro_batches == 4
    slow = fastest_cut(micro_batches_of({2: layers(1.0), 4: layers(0.9)}), PIPELINE, CORES)
    assert slow.micro_batches == 2
    assert slow.seconds == pytest.approx(slow.placement.step_s)


def test_more_micro_batches_that_gain_nothing_are_not_used() -> None:
    """Each may wait for a core, which costs do not include."""
    result = fastest_cut(micro_batches_of({2: layers(1.0), 4: layers(0.595)}), PIPELINE, CORES)
    assert result.micro_batches == 2  # 4 would be 1 % faster
    with pytest.raises(ConfigError, match="at least one number of micro-batches"):
        fastest_cut([], PIPELINE, CORES)


def test_every_worker_gets_parameters() -> None:
    """Two layers followed by three operations that take all the time but have no parameters."""
    graph = chain("abcde", seconds=[0.1, 0.1, 1.0, 1.0, 1.0], num_bytes=0, parameter_bytes=8)
    bare = [replace(node, parameter_bytes=0, num_layers=0) for node in graph.nodes[2:]]
    graph = replace(graph, nodes=(*graph.nodes[:2], *bare))
    setting = replace(PIPELINE, micro_batches=2)
    assert any(not part.parameter_bytes for part in best_cut(graph, setting, CORES).placement.parts)
    cut = fastest_cut(micro_batches_of({2: graph}), PIPELINE, CORES).placement
    assert all(part.parameter_bytes for part in cut.parts)


def test_worker_may_get_no_parameters_if_memory_requires_it() -> None:
    """Two layers that each fill a worker, followed by two operations without parameters."""
    graph = chain("abcd", seconds=[1.0, 1.0, 0.1, 0.1], num_bytes=0, parameter_bytes=8)
    bare = [replace(node, parameter_bytes=0, num_layers=0) for node in graph.nodes[2:]]
    graph = replace(graph, nodes=(*graph.nodes[:2], *bare))
    roomy = Pipeline(workers=workers(3), micro_batches=2)
    held = fastest_cut(micro_batches_of({2: graph}), roomy, CORES).placement.memory_bytes
    alone = place(graph, roomy, [0, 1, 2, 2]).memory_bytes
    assert alone < held
    tight = Pipeline(workers=workers(3, memory_bytes=alone), micro_batches=2)
    result = fastest_cut(micro_batches_of({2: graph}), tight, CORES).placement
    assert result.memory_bytes <= alone


def test_extra_time_of_the_first_micro_batch_counts_once() -> None:
    nodes = tuple(
        WorkNode(name=name, forward_s=1.0, first_s=first_s)
        for name, first_s in zip("abcd", (0.0, 0.0, 8.0, 8.0), strict=True)
    )
    edges = tuple(WorkEdge(name=f"e{i}", source=i, targets=(i + 1,), num_bytes=1) for i in range(4))
    graph = WorkGraph(nodes=nodes, edges=edges)
    assert graph.work_s == 4.0
    assert graph.alone_s == 20.0
    for micro_batches, expected in ((1, (1.0, 1.0, 9.0, 9.0)), (8, (1.0, 1.0, 2.0, 2.0))):
        pipeline = Pipeline(workers=workers(4), micro_batches=micro_batches)
        assert place(graph, pipeline, [0, 1, 2, 3]).loads_s == pytest.approx(expected)
    few = Pipeline(workers=workers(2), micro_batches=2)
    assert [len(part.nodes) for part in find_placement(graph, few).placement.parts] == [3, 1]


def test_worker_with_several_parts_is_busy_with_all_of_them() -> None:
    graph = chain("abcd", seconds=[1.0, 2.0, 3.0, 2.0], num_bytes=0)
    pipeline = Pipeline(workers=workers(4), micro_batches=4, schedule="interleaved", parts_each=2)
    cut = place(graph, pipeline, [0, 1, 2, 3])
    assert pipeline.num_workers == 2
    assert cut.balance_of(2) == 1.0
    assert cut.balance == pytest.approx(2.0 / 3.0)
    assert pipeline_step(cut, pipeline, 2.0).num_ranks == 2


def test_smaller_end_micro_batches_shorten_fill_and_drain() -> None:
    """Two equal parts, four micro-batches, 4 s of each part for one: the other waits for the first
    forward pass and the last one back, which are as long as these are large."""

    def graph_at(size: float) -> WorkGraph:
        return layers(2.0 * size)

    even = fastest_cut([MicroBatches(4, graph_at(1.0))], ONE_BACK, CORES)
    assert (even.ends, even.seconds) == (ALIKE, pytest.approx(20.0))
    result = fastest_cut([MicroBatches(4, graph_at(1.0), graph_at)], ONE_BACK, CORES)
    assert max(result.ends) < 1.0
    (first, more), (large, last) = micro_batch_shares(2, 2, result.ends)
    assert 2 * (first + last) < 2
    assert result.seconds == pytest.approx(16.0 + 2 * (first * 4.0 / 3 + last * 8.0 / 3))
    assert more + first == large + last == 1.0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_only_micro_batch_of_the_first_worker_is_cut_so_that_the_second_begins_sooner(
    schedule: str,
) -> None:
    """Two equal parts, 4 s of each part for a micro-batch; interleaved needs one of each worker."""

    def graph_at(size: float) -> WorkGraph:
        return layers(2.0 * size)

    setting = replace(PIPELINE, schedule=schedule)
    even = fastest_cut([MicroBatches(2, graph_at(1.0))], setting, CORES)
    result = fastest_cut([MicroBatches(2, graph_at(1.0), graph_at)], setting, CORES)
    if schedule == "interleaved":
        assert (result.ends, result.seconds) == (ALIKE, even.seconds)
        return
    assert result.ends.first < 1.0
    assert result.micro_batches == 2
    assert result.seconds < even.seconds
    shares = micro_batch_shares(2, 1, result.ends)
    assert len(shares[0]) == 2
    assert [sum(sizes) for sizes in shares] == [1.0, 1.0]


def test_end_micro_batches_stay_equal_if_small_ones_take_as_long() -> None:
    def graph_at(size: float) -> WorkGraph:
        return layers(1.9 + 0.1 * size)

    result = fastest_cut([MicroBatches(4, graph_at(1.0), graph_at)], ONE_BACK, CORES)
    assert result.ends == ALIKE


def test_gpipe_uses_equal_micro_batches() -> None:
    """Its forward passes come first, so the second part would wait for the larger ones."""

    def graph_at(size: float) -> WorkGraph:
        return layers(2.0 * size)

    assert fastest_cut([MicroBatches(4, graph_at(1.0), graph_at)], PIPELINE, CORES).ends == ALIKE


def test_larger_middle_micro_batches_must_fit_the_memory() -> None:
    def graph_at(size: float) -> WorkGraph:
        graph = layers(2.0 * size)
        nodes = tuple(replace(node, activation_bytes=1000) for node in graph.nodes)
        return replace(graph, nodes=nodes)

    held = {
        room: fastest_cut(
            [MicroBatches(4, graph_at(1.0), graph_at)],
            Pipeline(workers=workers(2, memory_bytes=room), schedule="1f1b"),
            CORES,
        )
        for room in (4100, 8000)
    }
    assert held[4100].ends == ALIKE
    assert held[8000].ends != ALIKE
    assert held[8000].placement.memory_bytes > held[4100].placement.memory_bytes
