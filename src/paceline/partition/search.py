"""Find the best cut of a model: exactly, over all borders, or in large models along one order.

    borders             {}   {0}   {0,1}   {0,2}   {0,1,2}  ...  all        sets that need nothing
                         |____________________|                             outside of themselves
    a part                  between two of them, one within the other

    best(border, workers used) = min over the border before it: one more part, on one more worker

A cut is chosen by its step (the formula of `partition`): the sum of all loads plus M - 1 times the
largest. Both grow with every part. So of two ways to the same border with the same workers, one
that is smaller in neither is dropped; otherwise both are kept. A way that can no longer beat the
even cut is dropped, too: the remaining work bounds its sum and its largest load from below. A chain
has as many borders as layers; a model of blocks has a few for each block. If there are more than
`MOST_BORDERS`, only those along the order of computing are searched, and of these the cheapest in
each of `MOST_WINDOWS` stretches of equal work: the result is then the best among them, and says so.

Sources: J. Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020 (a dynamic programme over sets that need nothing outside); D. Narayanan et al.,
"PipeDream", SOSP 2019 (the same for chains, by the slowest stage). Changed: cuts are compared by
the whole step, and workers may differ in speed. Above 300 lines, since the sums over a border are
read beside the search that uses them.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from ..errors import ConfigError
from .graph import WorkGraph
from .pipeline import Pipeline
from .placement import (
    PartPrice,
    Placement,
    check_parts,
    even_cut,
    even_parts,
    held_bytes,
    is_allowed,
    part_between,
    too_large,
)

MOST_BORDERS, MOST_WINDOWS = 600, 400
"""Every pair of borders is considered, so their number is limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlacement:
    """The best cut, and whether all cuts were considered.

    Args:
        is_exact: whether every possible border was considered.
        num_borders: number of borders that were considered.
    """

    placement: Placement
    is_exact: bool
    num_borders: int


def find_placement(graph: WorkGraph, pipeline: Pipeline) -> FoundPlacement:
    """Return the cut with the shortest step, with one part for each worker.

    Raises:
        ConfigError: there are more parts than nodes, or no cut fits the memory.

    Invariant: equals `brute_force.try_all_cuts` and is never worse than the even cut
    (tests/partition/test_search.py).
    """
    check_parts(len(graph), pipeline.num_parts)
    possible = all_borders(graph)
    borders = _borders_in_order(graph, pipeline) if possible is None else possible
    best = _Search(graph, pipeline, borders).run()
    if best is None:
        raise ConfigError(_why_none(graph, pipeline))
    return FoundPlacement(placement=best, is_exact=possible is not None, num_borders=len(borders))


def _why_none(graph: WorkGraph, pipeline: Pipeline) -> str:
    """Explain why no cut is possible, by what the even one lacks."""
    even = even_cut(graph, pipeline)
    lack = too_large(even, pipeline) or "nodes that share a parameter would be cut apart"
    return (
        f"no cut into {pipeline.num_parts} parts is possible: in the even one, {lack}; use more "
        f"workers (-n), more memory, or split into shards"
    )


def all_borders(graph: WorkGraph, most: int = MOST_BORDERS) -> list[int] | None:
    """Return every set of nodes that contains all its needs; None: there are more than ``most``."""
    needs = graph.needs()
    borders, frontier = {0}, {0}
    while frontier:
        frontier = {
            border | 1 << i
            for border in frontier
            for i, needed in enumerate(needs)
            if not border >> i & 1 and needed & border == needed
        }
        borders |= frontier
        if len(borders) > most:
            return None
    return sorted(borders)


def _borders_in_order(graph: WorkGraph, pipeline: Pipeline) -> list[int]:
    """Return the cheapest border in each stretch of work, and the borders of the even cut."""
    work = list(itertools.accumulate(node.work_s for node in graph.nodes))
    width_s = work[-1] / MOST_WINDOWS or 1.0
    cost_s = _costs_in_order(graph, pipeline)
    even = even_parts(graph, pipeline.num_parts)
    chosen = {i for i in range(1, len(graph)) if even[i] != even[i - 1]}
    for _, group in itertools.groupby(range(1, len(graph)), lambda i: int(work[i - 1] / width_s)):
        chosen.add(min(group, key=lambda i: cost_s[i]))
    return sorted({0, graph.whole, *((1 << i) - 1 for i in chosen)})


def _costs_in_order(graph: WorkGraph, pipeline: Pipeline) -> list[float]:
    """Return the seconds to send what crosses the border before each node."""
    # An edge adds its cost where it begins, and takes it off where it ends.
    changes = [0.0] * (len(graph) + 2)
    for edge in graph.edges:
        cost_s = pipeline.message_s(edge.num_bytes) + pipeline.message_s(edge.gradient_bytes)
        changes[edge.source + 1] += cost_s
        changes[edge.last + 1] -= cost_s
    return list(itertools.accumulate(changes))


class _Way(NamedTuple):
    """A way to a border: the cost of its parts, and the way to the border before it.

    Attributes:
        most_s, sum_s: the largest load of its parts, and the sum of all.
        border: index of the border where it ends.
        kind: index of the kind of worker of its last part.
        before: the way without its last part.
    """

    most_s: float
    sum_s: float
    border: int
    kind: int
    before: "_Way | None"


class _Search:
    """The dynamic programme drawn above; each round adds one part."""

    def __init__(self, graph: WorkGraph, pipeline: Pipeline, borders: Sequence[int]) -> None:
        self._graph, self._pipeline = graph, pipeline
        self._sums = sorted((_Sums.of(graph, pipeline, b) for b in borders), key=_by_work)
        self._work = [sums.work_s for sums in self._sums]
        self._num_nodes = [sums.border.bit_count() for sums in self._sums]
        self._kinds = list(dict.fromkeys(pipeline.workers))
        self._counts = tuple(pipeline.workers.count(kind) for kind in self._kinds)
        self._ties = [(sum(1 << i for i in tie.nodes), tie.num_bytes) for tie in graph.ties]
        late = [(node.late_gradient_bytes, 1 << i) for i, node in enumerate(graph.nodes)]
        self._late_gradients = sorted(filter(itemgetter(0), late), reverse=True)
        even = even_cut(graph, pipeline)
        bound_s = even.step_s if is_allowed(even, pipeline) else float("inf")
        self._bound_s = bound_s * (1.0 + 1e-9)

    def run(self) -> Placement | None:
        """Return the best cut; None: none is possible."""
        ways: dict[tuple[int, tuple[int, ...]], list[_Way]] = {
            (0, (0,) * len(self._kinds)): [_Way(0.0, 0.0, 0, -1, None)]
        }
        for number in range(self._pipeline.num_parts):
            longer: dict[tuple[int, tuple[int, ...]], list[_Way]] = {}
            for (start, used), shorter in ways.items():
                for end, kind, load_s in self._parts_from(start, used, number):
                    used_after = tuple(n + (i == kind) for i, n in enumerate(used))
                    for way in shorter:
                        most_s, sum_s = max(way.most_s, load_s), way.sum_s + load_s
                        if self._least_s(most_s, sum_s, end, used_after) <= self._bound_s:
                            _keep(
                                longer.setdefault((end, used_after), []),
                                _Way(most_s, sum_s, end, kind, way),
                            )
            ways = longer
        complete = [way for ends in ways.values() for way in ends]
        later = self._pipeline.micro_batches - 1
        if not complete:
            return None
        return self._placement(min(complete, key=lambda way: way.sum_s + later * way.most_s))

    def _parts_from(
        self, start: int, used: tuple[int, ...], number: int
    ) -> Iterator[tuple[int, int, float]]:
        """Yield each part that can begin at a border: its end, its worker's kind, its load."""
        parts_left = self._pipeline.num_parts - 1 - number
        before, last = self._sums[start], len(self._sums) - 1
        most_nodes = self._num_nodes[last] - parts_left  # each later part needs a node
        for kind, worker in enumerate(self._kinds):
            if used[kind] == self._counts[kind]:
                continue
            # A cut with a part that alone takes longer than the even cut's step is no better.
            most_s = before.work_s + self._bound_s / self._pipeline.micro_batches * worker.speed
            stop = bisect_right(self._work, most_s * (1.0 + 1e-9))
            for end in range(start + 1, min(stop, last)) if parts_left else [last]:
                after = self._sums[end]
                if self._num_nodes[end] > most_nodes:
                    continue
                if before.border & after.border != before.border:
                    continue
                load_s = self._load_s(before, after, worker.speed)
                if load_s is not None and self._fits(before, after, number, worker.memory_bytes):
                    yield end, kind, load_s

    def _load_s(self, before: "_Sums", after: "_Sums", speed: float) -> float | None:
        """Return the load of a part; None: it would separate tied nodes, or train nothing."""
        load_s = (after.work_s - before.work_s) / speed + before.crossing_s + after.crossing_s
        inside = after.border & ~before.border
        parameter_bytes, messages_s = after.parameter_bytes - before.parameter_bytes, 0.0
        for nodes, num_bytes in self._ties:
            if tied := nodes & inside:
                parameter_bytes += num_bytes
                if tied != nodes:
                    if self._pipeline.keeps_ties:
                        return None
                    messages_s += 2.0 * self._pipeline.message_s(num_bytes)
        if self._pipeline.trains_each and not parameter_bytes:
            return None
        once_s = parameter_bytes * self._pipeline.update_s_per_byte + after.first_s - before.first_s
        return load_s + (once_s / speed + messages_s) / self._pipeline.micro_batches

    def _fits(self, before: "_Sums", after: "_Sums", number: int, limit: int | None) -> bool:
        """Whether a part fits its worker's memory."""
        if limit is None:
            return True
        inside = after.border & ~before.border
        tied = sum(num_bytes for nodes, num_bytes in self._ties if nodes & inside)
        parameter_bytes = after.parameter_bytes - before.parameter_bytes + tied
        kept = after.kept_bytes - before.kept_bytes + before.crossing_bytes
        buffers = after.buffer_bytes - before.buffer_bytes
        late = after.late_bytes - before.late_bytes + before.crossing_bytes
        added = next((size for size, node in self._late_gradients if node & inside), 0)
        sizes = parameter_bytes, buffers, kept, late, added
        return held_bytes(self._pipeline, number, *sizes) <= limit

    def _least_s(self, most_s: float, sum_s: float, border: int, used: tuple[int, ...]) -> float:
        """Return a lower bound on the step of any cut that goes on from a border."""
        left_s = self._work[-1] - self._work[border]
        free = [
            (kind.speed, count - n)
            for kind, count, n in zip(self._kinds, self._counts, used, strict=True)
            if count > n
        ]
        if free:
            sum_s += left_s / max(speed for speed, _ in free)
            most_s = max(most_s, left_s / sum(speed * count for speed, count in free))
        return sum_s + (self._pipeline.micro_batches - 1) * most_s

    def _placement(self, way: _Way) -> Placement:
        """Price the cut that a way stands for."""
        ends: list[tuple[int, int]] = []
        prefix: _Way | None = way
        while prefix is not None and prefix.before is not None:
            ends.append((self._sums[prefix.border].border, prefix.kind))
            prefix = prefix.before
        free = {
            kind: [i for i, worker in enumerate(self._pipeline.workers) if worker == example]
            for kind, example in enumerate(self._kinds)
        }
        parts: list[PartPrice] = []
        before = 0
        for number, (after, kind) in enumerate(reversed(ends)):
            borders = (before, after)
            worker = free[kind].pop(0)
            parts.append(part_between(self._graph, self._pipeline, number, borders, worker))
            before = after
        return Placement(parts=tuple(parts), micro_batches=self._pipeline.micro_batches)


class _Sums(NamedTuple):
    """The sums over all nodes inside a border, and over all edges that cross it."""

    border: int
    work_s: float
    first_s: float
    parameter_bytes: int
    kept_bytes: int
    late_bytes: int
    buffer_bytes: int
    crossing_s: float
    crossing_bytes: int

    @classmethod
    def of(cls, graph: WorkGraph, pipeline: Pipeline, border: int) -> "_Sums":
        inside = [node for i, node in enumerate(graph.nodes) if border >> i & 1]
        crossing = list(graph.crossing(border))
        return cls(
            border=border,
            work_s=sum(node.work_s for node in inside),
            first_s=sum(node.first_s for node in inside),
            parameter_bytes=sum(node.parameter_bytes for node in inside),
            kept_bytes=sum(node.activation_bytes for node in inside),
            late_bytes=sum(node.late_bytes for node in inside),
            buffer_bytes=sum(node.buffer_bytes for node in inside),
            crossing_s=sum(
                pipeline.message_s(edge.num_bytes) + pipeline.message_s(edge.gradient_bytes)
                for edge in crossing
            ),
            crossing_bytes=sum(edge.num_bytes for edge in crossing),
        )


def _by_work(sums: _Sums) -> tuple[float, int]:
    """Return a key to sort by work; of equal work, the smaller set comes first."""
    return sums.work_s, sums.border.bit_count()


def _keep(ways: list[_Way], new: _Way) -> None:
    """Add a way unless a kept one is as good in both costs; drop the ways that it dominates."""
    for way in ways:
        if way.most_s <= new.most_s and way.sum_s <= new.sum_s:
            return
    ways[:] = [way for way in ways if not (new.most_s <= way.most_s and new.sum_s <= way.sum_s)]
    ways.append(new)
