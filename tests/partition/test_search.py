"""The search finds the best cut."""

import itertools
import random
from dataclasses import replace

import pytest

from paceline.collectives.base import LinkCost
from paceline.errors import ConfigError
from paceline.partition.brute_force import is_too_many, try_all_cuts
from paceline.partition.graph import WorkEdge, WorkGraph, WorkNode, chain
from paceline.partition.pipeline import Pipeline, workers
from paceline.partition.placement import Placement, even_cut, is_allowed, place
from paceline.partition.search import all_borders, find_placement
from work_graphs import random_graph, random_pipeline

LINK = LinkCost(latency_s=0.1, s_per_byte=0.001)


def found_or_none(graph: WorkGraph, pipeline: Pipeline) -> Placement | None:
    try:
        return find_placement(graph, pipeline).placement
    except ConfigError:
        return None


@pytest.mark.parametrize("seed", range(200))
def test_found_cut_of_a_random_graph_is_optimal(seed: int) -> None:
    draw = random.Random(seed)
    num_parts = draw.choice([2, 3, 4])
    graph = random_graph(draw, draw.randrange(num_parts, 13))
    pipeline = random_pipeline(draw, num_parts)
    best, result = try_all_cuts(graph, pipeline), found_or_none(graph, pipeline)
    if best is None:
        assert result is None
        return
    assert result is not None
    assert result.step_s == pytest.approx(best.step_s, rel=1e-9)
    assert is_allowed(result, pipeline)
    even = even_cut(graph, pipeline)
    if is_allowed(even, pipeline):
        assert result.step_s <= even.step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(100))
def test_found_cut_with_parameters_in_every_part_is_optimal(seed: int) -> None:
    """Half of the operations have no parameters and could be the part of a slow worker."""
    draw = random.Random(2000 + seed)
    num_parts = draw.choice([2, 3, 4])
    graph = random_graph(draw, draw.randrange(num_parts, 12))
    nodes = (
        replace(node, parameter_bytes=0) if draw.random() < 0.5 else node for node in graph.nodes
    )
    graph = replace(graph, nodes=tuple(nodes))
    pipeline = replace(random_pipeline(draw, num_parts), trains_each=True)
    best, result = try_all_cuts(graph, pipeline), found_or_none(graph, pipeline)
    assert (best is None) == (result is None)
    if best is not None and result is not None:
        assert result.step_s == pytest.approx(best.step_s, rel=1e-9)
        assert all(part.parameter_bytes for part in result.parts)


def test_random_graphs_cover_all_kinds() -> None:
    """Otherwise the test above would cover less than it seems to."""
    outcomes = set()
    for seed in range(200):
        draw = random.Random(seed)
        num_parts = draw.choice([2, 3, 4])
        graph = random_graph(draw, draw.randrange(num_parts, 13))
        pipeline = random_pipeline(draw, num_parts)
        result = found_or_none(graph, pipeline)
        outcomes.add((graph.is_chain(), bool(graph.ties), len(set(pipeline.workers)) > 1))
        outcomes.add(result is None)
        if result is not None:
            outcomes.add(result.step_s < even_cut(graph, pipeline).step_s * 0.99)
    assert {True, False} <= outcomes
    assert {one for one in outcomes if isinstance(one, tuple)} >= {
        (False, tied, uneven) for tied in (True, False) for uneven in (True, False)
    }


@pytest.mark.parametrize("seed", range(20))
def test_contiguous_parts_cover_all_acyclic_partitions(seed: int) -> None:
    """Every assignment of nodes to parts without a cycle between parts is contiguous."""
    draw = random.Random(1000 + seed)
    graph = random_graph(draw, draw.randrange(3, 7))
    needs = graph.needs()
    borders = all_borders(graph)
    assert borders is not None
    sets = {
        frozenset(
            frozenset(i for i in range(len(graph)) if (b & ~a) >> i & 1)
            for a, b in itertools.pairwise((0, one, other, graph.whole))
        )
        for one in borders
        for other in borders
        if 0 != one != other != graph.whole and one & other == one
    }
    free = set()
    for parts in itertools.product(range(3), repeat=len(graph)):
        arrows = {
            (parts[j], parts[i])
            for i in range(len(graph))
            for j in range(i)
            if needs[i] >> j & 1 and parts[i] != parts[j]
        }
        orders = itertools.permutations(range(3))
        in_a_row = any(all(o.index(a) < o.index(b) for a, b in arrows) for o in orders)
        if len(set(parts)) == 3 and in_a_row:
            free.add(
                frozenset(
                    frozenset(i for i, part in enumerate(parts) if part == p) for p in range(3)
                )
            )
    assert sets == free


@pytest.mark.parametrize("slow", [(), (3,), (0, 5, 11)])
def test_equal_workers_are_tried_in_one_order(slow: tuple[int, ...]) -> None:
    """Twelve workers have 479 million orders."""
    graph = chain("abcdefghijkl", seconds=[1.0 + i for i in range(12)], num_bytes=0)
    speeds = [0.5 if i in slow else 1.0 for i in range(12)]
    pipeline = Pipeline(workers=workers(12, speeds=speeds), micro_batches=4)
    assert not is_too_many(graph, pipeline)
    best = try_all_cuts(graph, pipeline)
    assert best is not None
    assert sorted(part.worker for part in best.parts) == list(range(12))
    assert [i for i, one in enumerate(best.parts) if one.worker in slow] == list(range(len(slow)))
    assert find_placement(graph, pipeline).placement.step_s == pytest.approx(best.step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("edges", "num_parts", "speeds"),
    [("chain", 12, [1.0 + i for i in range(12)]), ("none", 6, []), ("none", 12, [])],
)
def test_oversized_search_is_reported_as_too_many(
    edges: str, num_parts: int, speeds: list[float]
) -> None:
    graph = chain("abcdefghijkl", seconds=[1.0] * 12, num_bytes=0)
    if edges == "none":  # in any order
        graph = WorkGraph(nodes=graph.nodes, edges=())
    assert is_too_many(graph, Pipeline(workers=workers(num_parts, speeds=speeds)))


def test_slow_worker_gets_fewer_layers() -> None:
    graph = chain([f"l{i}" for i in range(10)], seconds=[1.0] * 10, num_bytes=0)
    pipeline = Pipeline(workers=workers(3, speeds=(1.0, 1.0, 0.5)), micro_batches=16)
    result = find_placement(graph, pipeline).placement
    sizes = {part.worker: len(part.nodes) for part in result.parts}
    assert sizes == {0: 4, 1: 4, 2: 2}


def test_slow_worker_may_have_any_position() -> None:
    """Only the middle part is short enough."""
    graph = chain("abc", seconds=[4.0, 1.0, 4.0], num_bytes=0)
    pipeline = Pipeline(workers=workers(3, speeds=(0.25, 1.0, 1.0)), micro_batches=4)
    assert [part.worker for part in find_placement(graph, pipeline).placement.parts][1] == 0


def test_cut_is_made_where_few_bytes_cross() -> None:
    nodes = tuple(WorkNode(name=name, forward_s=1.0, backward_s=2.0) for name in "abcd")
    sizes = (1000, 10, 1000)
    edges = tuple(
        WorkEdge(name=f"e{i}", source=i, targets=(i + 1,), num_bytes=n, gradient_bytes=n)
        for i, n in enumerate(sizes)
    )
    pipeline = Pipeline(workers=workers(2), link=LINK, micro_batches=4)
    result = find_placement(WorkGraph(nodes=nodes, edges=edges), pipeline).placement
    assert [part.nodes for part in result.parts] == [(0, 1), (2, 3)]
    assert result.cut_bytes == 2 * 10 * 4


def test_tensor_crossing_two_borders_is_forwarded() -> None:
    nodes = tuple(WorkNode(name=name, forward_s=1.0) for name in "abc")
    edges = (
        WorkEdge(name="skip", source=0, targets=(1, 2), num_bytes=7, gradient_bytes=7),
        WorkEdge(name="short", source=1, targets=(2,), num_bytes=5, gradient_bytes=5),
    )
    result = place(WorkGraph(nodes=nodes, edges=edges), Pipeline(workers=workers(3)), (0, 1, 2))
    assert [part.out_bytes for part in result.parts] == [7, 12, 0]


def test_part_that_does_not_fit_is_reported_with_the_missing_bytes() -> None:
    graph = chain("ab", seconds=[1.0, 1.0], num_bytes=0, parameter_bytes=3 * 1024)
    pipeline = Pipeline(workers=workers(2, memory_bytes=5 * 1024))
    with pytest.raises(ConfigError, match=r"part 0 needs 6.0 KiB.*has 5.0 KiB: 1.0 KiB too little"):
        find_placement(graph, pipeline)


def test_more_parts_than_layers_are_refused() -> None:
    graph = chain("abc", seconds=[1.0] * 3, num_bytes=0)
    with pytest.raises(ConfigError, match="4 parts are wanted, but this model has only 3 pieces"):
        find_placement(graph, Pipeline(workers=workers(4)))


def test_hundred_blocks_are_cut_over_eight_workers() -> None:
    """Too many borders to try all: those along the order, and no worse than the even cut."""
    draw = random.Random(7)
    nodes, edges = [], []
    for block in range(100):
        for inner in range(16):
            at = 16 * block + inner
            nodes.append(
                WorkNode(
                    name=f"b{block}.{inner}", forward_s=draw.random(), backward_s=draw.random()
                )
            )
            targets = (at + 1, 16 * block + 15) if inner == 0 else (at + 1,)
            edges.append(
                WorkEdge(name=f"e{at}", source=at, targets=targets, num_bytes=64, gradient_bytes=64)
            )
    graph = WorkGraph(nodes=tuple(nodes), edges=tuple(edges))
    pipeline = Pipeline(workers=workers(8), link=LINK, micro_batches=16)
    result = find_placement(graph, pipeline)
    assert not result.is_exact
    assert result.placement.step_s < even_cut(graph, pipeline).step_s
    assert result.placement.balance > 0.98
