"""The rings in a topology: in which order ranks stand, and how many rings run at once.

    one ring         0 - 3 - 2 - 1 - 5 - 6 - 7 - 4 - 0        as wide as its narrowest link
    several at once  each has an equal part of the buffer, and of the links that they share

        k rings of x bytes a second each fit if, on every link, (rings across it) x <= bandwidth;
        wanted: the k and the rings with the largest k x

All orders of up to eight ranks are tried (5,040 rings, a direction each). For each k and each x
that some link allows, best first, rings are put together until k of them fit (`_together`); so the
first that fit are the best. A ring crosses every cut between ranks, in both directions, so no k x
is larger than the narrowest cut: larger ones are not tried.

Source: NVIDIA's NCCL searches rings and their number in the same sense (its graph/search.cc);
C. Woolley, "NCCL: Accelerated Multi-GPU Collective Communications", GTC 2015. Exhaustive here.
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
        """Of all rings together."""
        return len(self.rings) * self.each_bytes_per_s


def planned_rings(topology: Topology, most: int = 8) -> ParallelRings:
    """The collective of the rings that are found.

    Raises:
        ConfigError: as `find_rings`.
    """
    return ParallelRings(find_rings(topology, most).rings)


@cache
def find_rings(topology: Topology, most: int = 1) -> RingSet:
    """The rings that move most bytes together; of equals the fewest.

    Args:
        most: rings at once, at least 1.

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
    rings = _one_for_each_load(topology)
    narrowest = min(out for _, _, out in cuts(topology))
    widths = [link.bytes_per_s for link in topology.links]
    wanted = sorted(
        (
            (-count * width / crossing, count, width / crossing)
            for count in range(1, most + 1)
            for width in set(widths)
            for crossing in range(1, count * topology.num_ranks + 1)
            if count * width / crossing <= narrowest * (1.0 + _ROUNDING)
        ),
    )
    for _, count, each in wanted:
        room = [int(width / each * (1.0 + _ROUNDING)) for width in widths]
        found = _together(list(rings.values()), list(rings), count, room)
        if found is not None:
            return RingSet(rings=tuple(found), each_bytes_per_s=each)
    raise AssertionError("one ring fits at the rate of its narrowest link")


Load = tuple[tuple[int, int], ...]  # (place of a link, how often the ring crosses it)


def _one_for_each_load(topology: Topology) -> dict[Load, tuple[int, ...]]:
    """Of the rings that put the same load on the same links the first, in order of ranks."""
    rings: dict[Load, tuple[int, ...]] = {}
    for order in itertools.permutations(range(1, topology.num_ranks)):
        ring = (0, *order)
        crossed: Counter[int] = Counter()
        for source, destination in zip(ring, (*order, 0), strict=True):
            crossed.update(topology.way(source, destination))
        rings.setdefault(tuple(sorted(crossed.items())), ring)
    return rings


def _together(
    rings: Sequence[tuple[int, ...]], loads: Sequence[Load], count: int, room: list[int]
) -> list[tuple[int, ...]] | None:
    """So many of these rings, repeated or not, that no link is crossed more often than it may."""
    fitting = [
        place
        for place, load in enumerate(loads)
        if all(times <= room[link] for link, times in load)
    ]

    def after(first: int, left: int) -> Iterator[list[int]]:
        if not left:
            yield []
            return
        for number in range(first, len(fitting)):
            load = loads[fitting[number]]
            if any(times > room[link] for link, times in load):
                continue
            for link, times in load:
                room[link] -= times
            yield from ([number, *rest] for rest in after(number, left - 1))
            for link, times in load:
                room[link] += times

    for numbers in after(0, count):
        return [rings[fitting[number]] for number in numbers]
    return None
