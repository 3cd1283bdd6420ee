"""The least that a topology allows, by brute force over its cuts, and the share that is reached.

    all-gather of n bytes, n / P with each rank. Take any set S of ranks and switches:

        +-- S -------------+
        |  0   1   2       | === bandwidth out of S ===>   somebody out here needs all of S's chunks
        +------------------+

        T >= (n |ranks in S| / P) / B_out(S)        and the largest of these, over all S that leave
                                                    some rank out, is the least there can be

A reduce-scatter is an all-gather backwards: the bandwidth into S. An all-reduce is taken as one
after the other, as ForestColl does; a broadcast has to get n bytes out of every S with the root in
it. Only bandwidth is counted: latency is a question of small buffers.

Brute force over 2^V sets of V vertices, so V is at most 16.

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
"""65,536 sets, a second or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBound:
    """The least time, and the set of vertices that takes it."""

    s_per_byte: float  # of the whole buffer
    cut: frozenset[int]  # the ranks and switches on one side


@cache
def least_s_per_byte(topology: Topology, operation: Operation, root: int = 0) -> CutBound:
    """The bound of an operation; of an all-reduce the cut that counts in its all-gather.

    Raises:
        ConfigError: there are more than 16 vertices, or no bound is known for the operation.
    """
    if operation is Operation.ALL_REDUCE:
        first = _worst_cut(topology, Operation.REDUCE_SCATTER, root)
        then = _worst_cut(topology, Operation.ALL_GATHER, root)
        return CutBound(s_per_byte=first.s_per_byte + then.s_per_byte, cut=then.cut)
    if operation not in _BOUNDED:
        names = ", ".join(one.value for one in (*_BOUNDED, Operation.ALL_REDUCE))
        raise ConfigError(f"no bound is known for {operation.value}; there is one for {names}")
    return _worst_cut(topology, operation, root)


_BOUNDED = (
    Operation.ALL_GATHER,
    Operation.REDUCE_SCATTER,
    Operation.BROADCAST,
    Operation.REDUCE,
)


def _worst_cut(topology: Topology, operation: Operation, root: int) -> CutBound:
    worst_s, worst = 0.0, 0
    for chosen, num_inside, out in cuts(topology, is_inward=operation.is_reducing):
        if operation.has_root and not chosen >> root & 1:
            continue
        if not out:
            side = sorted(_vertices(chosen))
            raise ConfigError(f"{topology.name}: nothing leads across the cut around {side}")
        share = 1.0 if operation.has_root else num_inside / topology.num_ranks
        if share / out > worst_s:
            worst_s, worst = share / out, chosen
    return CutBound(s_per_byte=worst_s, cut=frozenset(_vertices(worst)))


def cuts(topology: Topology, *, is_inward: bool = False) -> Iterator[tuple[int, int, float]]:
    """Every set of vertices, a bit each, that has some ranks and not all.

    Returns:
        The set, how many ranks are in it, and the bandwidth out of it, or into it.

    Raises:
        ConfigError: there are more than 16 vertices.
    """
    if topology.num_vertices > MOST_VERTICES:
        raise ConfigError(
            f"{topology.name} has {topology.num_vertices} vertices, and all cuts are tried of at "
            f"most {MOST_VERTICES}; take a part of it"
        )
    ends = [(1 << link.source, 1 << link.destination, link.bytes_per_s) for link in topology.links]
    if is_inward:
        ends = [(b, a, width) for a, b, width in ends]
    all_ranks = (1 << topology.num_ranks) - 1
    for chosen in range(1, 1 << topology.num_vertices):
        inside = chosen & all_ranks
        if inside not in (0, all_ranks):
            out = sum(width for a, b, width in ends if chosen & a and not chosen & b)
            yield chosen, inside.bit_count(), out


def _vertices(chosen: int) -> list[int]:
    return [vertex for vertex in range(chosen.bit_length()) if chosen >> vertex & 1]


def share_of_optimum(
    topology: Topology,
    collective: Collective,
    operation: Operation,
    size_bytes: int = 1 << 30,
    root: int = 0,
) -> float:
    """How much of the topology's bandwidth a schedule makes use of: bound over cost, at most 1.

    What schedules are held against (tests/collectives/test_topology.py); no run asks for it.

    Args:
        size_bytes: large, so that chunks are equal but for a byte.
    """
    least = least_s_per_byte(topology, operation, root).s_per_byte * size_bytes
    took = cost_on(topology.without_latency(), collective, operation, size_bytes, root=root)
    return least / took.seconds if took.seconds else 1.0
