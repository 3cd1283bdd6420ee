"""The least time that a topology allows, by brute force over its cuts, and the share reached of it.

    all-gather of n bytes, n / P with each rank. Take any set S of ranks and switches:

        +-- S -------------+
        |  0   1   2       | === bandwidth out of S ===>   somebody out here needs all of S's chunks
        +------------------+

        T >= (n |ranks in S| / P) / B_out(S)        the largest of these, over all S that leave some
                                                    rank out, is the least possible time

A reduce-scatter is an all-gather run backwards, so the bandwidth into S counts. An all-reduce is
taken as one after the other, as ForestColl does; a broadcast has to get n bytes out of every S that
holds the root. Only bandwidth is counted, since latency matters only for small buffers.

There are 2^V sets of V vertices, so V is at most 16.

Source: L. Zhao et al., "ForestColl: Throughput-Optimal Collective Communications
on Heterogeneous Network Fabrics", arXiv 2402.06787, 2024 (the bound, and that packed trees reach it
for the all-gather; there in polynomial time).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ..errors import ConfigError
from .base import Collective
from .cost import cost_on
from .topology import Topology
from .transfers import Operation

MOST_VERTICES = 16
"""65,536 sets, which take a second or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBound:
    """A lower bound of an operation's time, and the set of vertices that sets it."""

    s_per_byte: float  # per byte of the whole buffer
    cut: frozenset[int]  # the ranks and switches on one side


@cache
def least_s_per_byte(topology: Topology, operation: Operation, root: int = 0) -> CutBound:
    """Return an operation's bound; the cut of an all-reduce is that of its all-gather.

    Raises:
        ConfigError: there are more than 16 vertices, or no bound is known for the operation.
    """
    if operation is Operation.ALL_REDUCE:
        reduce = _worst_cut(topology, Operation.REDUCE_SCATTER, root)
        gather = _worst_cut(topology, Operation.ALL_GATHER, root)
        return CutBound(s_per_byte=reduce.s_per_byte + gather.s_per_byte, cut=gather.cut)
    if operation not in _BOUNDED:
        names = ", ".join(bounded.value for bounded in (*_BOUNDED, Operation.ALL_REDUCE))
        raise ConfigError(f"no bound is known for {operation.value}; there is one for {names}")
    return _worst_cut(topology, operation, root)


_BOUNDED = (
    Operation.ALL_GATHER,
    Operation.REDUCE_SCATTER,
    Operation.BROADCAST,
    Operation.REDUCE,
)


def _worst_cut(topology: Topology, operation: Operation, root: int) -> CutBound:
    worst_s_per_byte, worst = 0.0, 0
    for cut, num_inside, bytes_per_s in cuts(topology, is_inward=operation.is_reducing):
        if operation.has_root and not cut >> root & 1:
            continue
        if not bytes_per_s:
            side = sorted(_vertices(cut))
            raise ConfigError(f"{topology.name}: no link crosses the cut around {side}")
        share = 1.0 if operation.has_root else num_inside / topology.num_ranks
        if share / bytes_per_s > worst_s_per_byte:
            worst_s_per_byte, worst = share / bytes_per_s, cut
    return CutBound(s_per_byte=worst_s_per_byte, cut=frozenset(_vertices(worst)))


def cuts(topology: Topology, *, is_inward: bool = False) -> Iterator[tuple[int, int, float]]:
    """Yield every set of vertices that holds some of the ranks and not all.

    Yields:
        The set as a bit mask, the number of ranks in it, and the bandwidth out of it in bytes per
        second; the bandwidth into it if ``is_inward``.

    Raises:
        ConfigError: there are more than 16 vertices.
    """
    if topology.num_vertices > MOST_VERTICES:
        raise ConfigError(
            f"{topology.name} has {topology.num_vertices} vertices, but all cuts are tried only up "
            f"to {MOST_VERTICES}; take a part of it"
        )
    links = [(1 << link.source, 1 << link.destination, link.bytes_per_s) for link in topology.links]
    if is_inward:
        links = [(target, source, bytes_per_s) for source, target, bytes_per_s in links]
    all_ranks = (1 << topology.num_ranks) - 1
    for cut in range(1, 1 << topology.num_vertices):
        ranks = cut & all_ranks
        if ranks not in (0, all_ranks):
            across = (
                bytes_per_s
                for source, target, bytes_per_s in links
                if cut & source and not cut & target
            )
            yield cut, ranks.bit_count(), sum(across)


def _vertices(cut: int) -> list[int]:
    return [vertex for vertex in range(cut.bit_length()) if cut >> vertex & 1]


def share_of_optimum(
    topology: Topology,
    collective: Collective,
    operation: Operation,
    size_bytes: int = 1 << 30,
    root: int = 0,
) -> float:
    """Return the share of the topology's bandwidth that a schedule uses: bound / cost, at most 1.

    What schedules are held against (tests/collectives/test_topology.py); no run asks for it.

    Args:
        size_bytes: large, so that chunks differ by no more than a byte.
    """
    least_s = least_s_per_byte(topology, operation, root).s_per_byte * size_bytes
    cost = cost_on(topology.without_latency(), collective, operation, size_bytes, root=root)
    return least_s / cost.seconds if cost.seconds else 1.0
