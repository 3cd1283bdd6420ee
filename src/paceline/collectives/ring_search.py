"""Searches a topology for the best rings: the orders of ranks, and the number of rings at once.

    one ring         0 - 3 - 2 - 1 - 5 - 6 - 7 - 4 - 0        as wide as its narrowest link
    several at once  each has an equal part of the buffer, and of the links that they share

        k rings of x bytes per second each fit if, on every link, (rings across it) x <= bandwidth;
        wanted: the k and the rings with the largest k x

All orders of up to eight ranks are tried (5,040 rings, each direction counted). For each k and each
x that some link allows, from the largest k x down, `_fit_together` looks for k rings that fit, so
the first that it finds are the best. A ring crosses every cut between ranks, in both directions, so
no k x can exceed the narrowest cut, and larger ones are not tried.

Source: NVIDIA's NCCL searches rings and their number in the same sense (its graph/search.cc);
C. Woolley, "NCCL: Accelerated Multi-GPU Collective Communications", GTC 2015. Changed: the search
is exhaustive.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ..errors import ConfigError
from .optimum import cuts
from .rings import ParallelRings
from .topology import Topology

MOST_RANKS = 8
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSet:
    """Rings that run at the same time."""

    rings: tuple[tuple[int, ...], ...]  # ranks in order; the last sends to the first
    each_bytes_per_s: float

    @property
    def total_bytes_per_s(self) -> float:
        """The bytes per second of all rings together."""
        return len(self.rings) * self.each_bytes_per_s


def planned_rings(topology: Topology, most: int = 8) -> ParallelRings:
    """Return a collective that uses the rings found by `find_rings`.

    Raises:
        ConfigError: as `find_rings` does.
    """
    return ParallelRings(find_rings(topology, most).rings)


@cache
def find_rings(topology: Topology, most: int = 1) -> RingSet:
    """Return the rings that together move the most bytes per second, the fewest of equally good.

    Args:
        most: the largest number of rings at once, at least 1.

    Raises:
        ConfigError: there are more than eight ranks or fewer than two, or ``most`` is below 1.
    """
    if not 2 <= topology.num_ranks <= MOST_RANKS:
        raise ConfigError(
            f"rings are searched for between 2 and {MOST_RANKS} ranks, got {topology.num_ranks}; "
            f"for more, search within a host and take hierarchical:{MOST_RANKS} between hosts"
        )
    if most < 1:
        raise ConfigError(f"the number of rings at once must be at least 1, got {most}")
    rings = _distinct_rings(topology)
    narrowest = min(bytes_per_s for _, _, bytes_per_s in cuts(topology))
    widths = [link.bytes_per_s for link in topology.links]
    candidates = sorted(
        (
            (-num_rings * width / num_crossings, num_rings, width / num_crossings)
            for num_rings in range(1, most + 1)
            for width in set(widths)
            for num_crossings in range(1, num_rings * topology.num_ranks + 1)
            if num_rings * width / num_crossings <= narrowest * (1.0 + _ROUNDING)
        ),
    )
    for _, num_rings, each_bytes_per_s in candidates:
        room = [int(width / each_bytes_per_s * (1.0 + _ROUNDING)) for width in widths]
        chosen = _fit_together(list(rings.values()), list(rings), num_rings, room)
        if chosen is not None:
            return RingSet(rings=tuple(chosen), each_bytes_per_s=each_bytes_per_s)
    raise AssertionError("one ring fits at the rate of its narrowest link")


Load = tuple[tuple[int, int], ...]  # (index of a link, how often the ring crosses it)


def _distinct_rings(topology: Topology) -> dict[Load, tuple[int, ...]]:
    """Return one ring for each distinct load on the links: the first in the order of ranks."""
    rings: dict[Load, tuple[int, ...]] = {}
    for order in itertools.permutations(range(1, topology.num_ranks)):
        ring = (0, *order)
        crossed: Counter[int] = Counter()
        for source, destination in zip(ring, (*order, 0), strict=True):
            crossed.update(topology.way(source, destination))
        rings.setdefault(tuple(sorted(crossed.items())), ring)
    return rings


def _fit_together(
    rings: Sequence[tuple[int, ...]], loads: Sequence[Load], num_rings: int, room: list[int]
) -> list[tuple[int, ...]] | None:
    """Return rings that fit together, or None if there are none; a ring may be chosen repeatedly.

    Args:
        rings: the candidates.
        loads: of each candidate.
        num_rings: how many to choose.
        room: how often each link may be crossed.
    """
    fitting = [
        index
        for index, load in enumerate(loads)
        if all(times <= room[link] for link, times in load)
    ]

    def choices(first: int, num_left: int) -> Iterator[list[int]]:
        if not num_left:
            yield []
            return
        for index in range(first, len(fitting)):
            load = loads[fitting[index]]
            if any(times > room[link] for link, times in load):
                continue
            for link, times in load:
                room[link] -= times
            yield from ([index, *rest] for rest in choices(index, num_left - 1))
            for link, times in load:
                room[link] += times

    for chosen in choices(0, num_rings):
        return [rings[fitting[index]] for index in chosen]
    return None
