"""The best cut: exactly, over all borders; of large models over those along one order.

    borders             {}   {0}   {0,1}   {0,2}   {0,1,2}  ...  all        sets that need nothing
                         |____________________|                             outside of themselves
    a part                  between two of them, one within the other

    best(border, workers used) = over the border before it: one part more, on one worker more

A cut is chosen by its step (the table of `partition`): the sum of all loads and M - 1 times the
most. Both grow with every part, so of two ways to the same border with the same workers one that
is no less in either is dropped; of others both are kept. What cannot beat the even cut any more is
dropped, too: by the work that is left, and the load that it must at least be. A chain has as many
borders as layers; a model of blocks a few for each block. Where there are more than
`MOST_BORDERS` only those along the order of computing count, and of these the cheapest in each of
`MOST_WINDOWS` stretches of equal work: then the answer is the best among them, and says so.

Sources: J. Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020 (a dynamic programme over sets that need nothing outside); D. Narayanan et al.,
"PipeDream", SOSP 2019 (the same for chains, by the slowest stage). Changed: by the whole step, and
for workers of several speeds. Above 300 lines, since what a border needs is told beside it.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    is_allowed,
    part_between,
    too_large,
)

MOST_BORDERS, MOST_WINDOWS = 600, 400
"""Of borders all pairs are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlacement:
    """The best cut, and whether all cuts were considered.

    Args:
        is_exact: every set that could be a border was one.
        num_borders: that were considered.
    """

    placement: Placement
    is_exact: bool
    num_borders: int


def find_placement(graph: WorkGraph, pipeline: Pipeline) -> FoundPlacement:
    """The cut into as many parts as there are workers whose step is the shortest.

    Raises:
        ConfigError: there are more parts than nodes, or no cut fits the memory.

    Invariant: equals `brute_force.try_all_cuts` and is never worse than the even cut
    (tests/partition/test_search.py).
    """
    check_parts(len(graph), pipeline.num_parts)
    every = all_borders(graph)
    borders = _borders_of_order(graph, pipeline) if every is None else every
    found = _Search(graph, pipeline, borders).run()
    if found is None:
        raise ConfigError(_why_none(graph, pipeline))
    return FoundPlacement(placement=found, is_exact=every is not None, num_borders=len(borders))


def _why_none(graph: WorkGraph, pipeline: Pipeline) -> str:
    """No cut fits: what the even one lacks."""
    even = even_cut(graph, pipeline)
    lack = too_large(even, pipeline) or "nodes that share a parameter cannot be cut apart"
    return (
        f"no cut into {pipeline.num_parts} parts is possible: even, {lack}; give more workers "
        f"(-n), more memory, or split into shards"
    )


def all_borders(graph: WorkGraph, most: int = MOST_BORDERS) -> list[int] | None:
    """Every set of nodes that holds all that its nodes need; None: there are more than ``most``."""
    needs = graph.needs()
    found, edge = {0}, {0}
    while edge:
        edge = {
            border | 1 << i
            for border in edge
            for i, needed in enumerate(needs)
            if not border >> i & 1 and needed & border == needed
        }
        found |= edge
        if len(found) > most:
            return None
    return sorted(found)


def _borders_of_order(graph: WorkGraph, pipeline: Pipeline) -> list[int]:
    """Along the order of computing: the cheapest of each stretch of work, and those of the even."""
    work = list(itertools.accumulate(node.work_s for node in graph.nodes))
    width_s = work[-1] / MOST_WINDOWS or 1.0
    cost_s = _costs_of_order(graph, pipeline)
    even = even_parts(graph, pipeline.num_parts)
    chosen = {i for i in range(1, len(graph)) if even[i] != even[i - 1]}
    for _, group in itertools.groupby(range(1, len(graph)), lambda i: int(work[i - 1] / width_s)):
        chosen.add(min(group, key=lambda i: cost_s[i]))
    return sorted({0, graph.whole, *((1 << i) - 1 for i in chosen)})


def _costs_of_order(graph: WorkGraph, pipeline: Pipeline) -> list[float]:
    """What crosses the border before each node, in seconds; each edge is added where it is live."""
    steps = [0.0] * (len(graph) + 2)
    for edge in graph.edges:
        took_s = pipeline.message_s(edge.num_bytes) + pipeline.message_s(edge.gradient_bytes)
        steps[edge.source + 1] += took_s
        steps[edge.last + 1] -= took_s
    return list(itertools.accumulate(steps))


class _Way(NamedTuple):
    """A way to a border: what its parts cost, and the way to the border before it."""

    most_s: float
    sum_s: float
    border: int  # where it ends, by its number
    worker: int  # of its last part
    before: "_Way | None"


class _Search:
    """The dynamic programme, as drawn above; one layer a part."""

    def __init__(self, graph: WorkGraph, pipeline: Pipeline, borders: Sequence[int]) -> None:
        self._graph, self._pipeline = graph, pipeline
        self._sums = sorted((_Sums.of(graph, pipeline, one) for one in borders), key=_work)
        self._work = [one.work_s for one in self._sums]
        self._num_nodes = [one.border.bit_count() for one in self._sums]
        self._kinds = list(dict.fromkeys(pipeline.workers))
        self._counts = tuple(pipeline.workers.count(kind) for kind in self._kinds)
        self._ties = [(sum(1 << i for i in tie.nodes), tie.num_bytes) for tie in graph.ties]
        even = even_cut(graph, pipeline)
        bound_s = even.step_s if is_allowed(even, pipeline) else float("inf")
        self._bound_s = bound_s * (1.0 + 1e-9)

    def run(self) -> Placement | None:
        """The best; None: nothing is possible."""
        ways: dict[tuple[int, tuple[int, ...]], list[_Way]] = {
            (0, (0,) * len(self._kinds)): [_Way(0.0, 0.0, 0, -1, None)]
        }
        for number in range(self._pipeline.num_parts):
            longer: dict[tuple[int, tuple[int, ...]], list[_Way]] = {}
            for (at, used), known in ways.items():
                for to, which, load_s in self._parts_from(at, used, number):
                    after = tuple(n + (i == which) for i, n in enumerate(used))
                    for way in known:
                        most_s, sum_s = max(way.most_s, load_s), way.sum_s + load_s
                        if self._least_s(most_s, sum_s, to, after) <= self._bound_s:
                            _keep(
                                longer.setdefault((to, after), []),
                                _Way(most_s, sum_s, to, which, way),
                            )
            ways = longer
        ends = [way for known in ways.values() for way in known]
        more = self._pipeline.micro_batches - 1
        if not ends:
            return None
        return self._placement(min(ends, key=lambda way: way.sum_s + more * way.most_s))

    def _parts_from(
        self, at: int, used: tuple[int, ...], number: int
    ) -> Iterator[tuple[int, int, float]]:
        """Each part that can begin here: where it ends, the kind of its worker, its load."""
        parts_left = self._pipeline.num_parts - 1 - number
        before, end = self._sums[at], len(self._sums) - 1
        most_nodes = self._num_nodes[end] - parts_left  # each part has one
        for which, kind in enumerate(self._kinds):
            if used[which] == self._counts[which]:
                continue
            # A part alone that takes longer than the even cut's step is in no better one.
            most_s = before.work_s + self._bound_s / self._pipeline.micro_batches * kind.speed
            stop = bisect_right(self._work, most_s * (1.0 + 1e-9))
            for to in range(at + 1, min(stop, end)) if parts_left else [end]:
                after = self._sums[to]
                if self._num_nodes[to] > most_nodes:
                    continue
                if before.border & after.border != before.border:
                    continue
                load_s = self._load_s(before, after, kind.speed)
                if load_s is not None and self._fits(before, after, number, kind.memory_bytes):
                    yield to, which, load_s

    def _load_s(self, before: "_Sums", after: "_Sums", speed: float) -> float | None:
        """Of a part; None: it would cut apart what is tied, or train nothing."""
        load_s = (after.work_s - before.work_s) / speed + before.crossing_s + after.crossing_s
        inside = after.border & ~before.border
        parameter_bytes, messages_s = after.parameter_bytes - before.parameter_bytes, 0.0
        for nodes, num_bytes in self._ties:
            if own := nodes & inside:
                parameter_bytes += num_bytes
                if own != nodes:
                    if self._pipeline.keeps_ties:
                        return None
                    messages_s += 2.0 * self._pipeline.message_s(num_bytes)
        if self._pipeline.trains_each and not parameter_bytes:
            return None
        once_s = parameter_bytes * self._pipeline.update_s_per_byte + after.first_s - before.first_s
        return load_s + (once_s / speed + messages_s) / self._pipeline.micro_batches

    def _fits(self, before: "_Sums", after: "_Sums", number: int, most: int | None) -> bool:
        if most is None:
            return True
        inside = after.border & ~before.border
        tied = sum(num_bytes for nodes, num_bytes in self._ties if nodes & inside)
        parameter_bytes = after.parameter_bytes - before.parameter_bytes + tied
        kept = after.kept_bytes - before.kept_bytes + before.crossing_bytes
        held = (2 + self._pipeline.state_copies) * parameter_bytes
        held += after.buffer_bytes - before.buffer_bytes
        live = self._pipeline.live(number)
        late = after.late_bytes - before.late_bytes + before.crossing_bytes
        return held + live * kept + (self._pipeline.micro_batches - live) * late <= most

    def _least_s(self, most_s: float, sum_s: float, at: int, used: tuple[int, ...]) -> float:
        """What a step must take at least that goes on from here."""
        left_s = self._work[-1] - self._work[at]
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
        """The cut that a way stands for, priced as one that is given."""
        ends: list[tuple[int, int]] = []
        at: _Way | None = way
        while at is not None and at.before is not None:
            ends.append((self._sums[at.border].border, at.worker))
            at = at.before
        free = {
            which: [i for i, one in enumerate(self._pipeline.workers) if one == kind]
            for which, kind in enumerate(self._kinds)
        }
        parts: list[PartPrice] = []
        before = 0
        for number, (after, which) in enumerate(reversed(ends)):
            borders = (before, after)
            worker = free[which].pop(0)
            parts.append(part_between(self._graph, self._pipeline, number, borders, worker))
            before = after
        return Placement(parts=tuple(parts), micro_batches=self._pipeline.micro_batches)


class _Sums(NamedTuple):
    """Of a border: what all nodes in it have together, and what crosses it."""

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
                pipeline.message_s(one.num_bytes) + pipeline.message_s(one.gradient_bytes)
                for one in crossing
            ),
            crossing_bytes=sum(one.num_bytes for one in crossing),
        )


def _work(sums: _Sums) -> tuple[float, int]:
    """By work, and of equal work the smaller set first."""
    return sums.work_s, sums.border.bit_count()


def _keep(known: list[_Way], way: _Way) -> None:
    """Add a way unless one that is known is no more in anything; drop those that it beats."""
    for one in known:
        if one.most_s <= way.most_s and one.sum_s <= way.sum_s:
            return
    known[:] = [one for one in known if not (way.most_s <= one.most_s and way.sum_s <= one.sum_s)]
    known.append(way)
