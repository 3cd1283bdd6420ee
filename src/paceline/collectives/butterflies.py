"""halving-doubling: partners twice as far away each round, with half as much to tell.

    P = 8, reduce-scatter; in round i ranks r and r XOR 2^i give each other what the other keeps

        round 0     0---1    2---3    4---5    6---7       n/2 each way
        round 1     0-------2    1-------3    4-------6    5-------7       n/4
        round 2     0---------------4    1---------------5    2---...      n/8: rank r has chunk r
        all-gather: the same, backwards, with copies

    T = 2 (k (alpha + o) + beta n (P - 1) / P) + gamma n (P - 1) / P        P = 2^k

The fewest bytes in the fewest rounds, where P is a power of two. Other P are folded: each rank from
2^k on first gives all it has to rank r - 2^k, and is told the sum at the end, which costs
2 (alpha + o + n beta) + gamma n more; of their operations only the all-reduce is there.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", International Journal of High Performance Computing Applications 19(1), 2005
(Rabenseifner's algorithm, with vector halving and distance doubling).

bine: the same, with partners that are nearer on a ring of ranks.

    In round i rank r tells r + d_i where r is even, r - d_i where it is odd, modulo P:
    d_i = (1 - (-2)^(i+1)) / 3 = 1, -1, 3, -5, 11, ...

        P = 8       halving-doubling:  1  2  4 apart          bine:  1  1  3 apart
        round 0     0---1    2---3    4---5    6---7
        round 1     1---2    3---4    5---6    7---0
        round 2     0-----------3    2-----------5    4-----------7    6-----------1

    T = 2 (k (alpha + o) + beta n (P - 1) / P) + gamma n (P - 1) / P        P = 2^k

On a network of equals as fast as halving-doubling. Where neighbours in rank are neighbours in the
network, distances are two thirds as long, so that less crosses the links between groups. The chunks
of a message do not lie side by side. Other P: as above.

Source: D. De Sensi, S. Pasqualoni, L. Piarulli, T. Bonato, S. Ba, M. Turisini, J. Domke, T.
Hoefler, "Bine Trees: Enhancing Collective Operations by Optimizing Communication Locality", SC '25
(arXiv 2508.17311); the distances as in D. De Sensi, T. Bonato, D. Saam, T. Hoefler, "Swing:
Short-cutting Rings for Higher Bandwidth Allreduce", NSDI 2024. Changed: chunks keep their numbers,
and P that are no powers of two are folded.
"""

import abc
from collections.abc import Iterable, Iterator
from itertools import chain

from ..errors import ConfigError
from .base import LinkCost, Spreading
from .transfers import Action, ChunkTransfer, Operation, Round, floor_power_of_two


class Butterfly(Spreading):
    """In every round all ranks are in pairs; after log P rounds everybody has heard of everybody.

    What ``reach(r, i)`` holds is what rank r is told from round i on: itself, and what its partners
    of rounds i, i + 1, ... then reach. In the reduce-scatter it gives its partner of round i the
    chunks that the partner reaches from round i + 1 on.
    """

    operations = (
        Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.BROADCAST,
        Operation.REDUCE,
    )  # fmt: skip

    @abc.abstractmethod
    def _partner(self, rank: int, number: int) -> int:
        """Of a rank among the first ``num_folded``, in a round of the reduce-scatter."""

    @property
    def num_folded(self) -> int:
        """2^k, the ranks that take part throughout."""
        return floor_power_of_two(self.num_ranks)

    def num_chunks(self, operation: Operation) -> int:
        return self.num_folded

    def check(self, operation: Operation) -> None:
        below = self.num_folded
        if below != self.num_ranks and operation is not Operation.ALL_REDUCE:
            instead = "tree" if operation.has_root else "ring"
            raise ConfigError(
                f"the {operation.value} of {self} needs a power of two ranks, got "
                f"{self.num_ranks}; {below} and {2 * below} fit, or take {instead}"
            )

    def _rounds(self, operation: Operation, root: int) -> Iterable[Round]:
        inner = super()._rounds(operation, root)
        return folded(inner, range(self.num_folded), range(self.num_folded, self.num_ranks))

    def _spread(self, operation: Operation, root: int) -> Iterator[Round]:
        size = self.num_folded
        num_rounds = size.bit_length() - 1
        reach = self._reach(num_rounds)
        whole, holders = tuple(range(size)), {root}
        for number in reversed(range(num_rounds)):
            if operation is Operation.BROADCAST:
                pairs = [(rank, self._partner(rank, number)) for rank in sorted(holders)]
                holders.update(other for _, other in pairs)
                yield tuple(ChunkTransfer(a, b, whole, Action.COPY) for a, b in pairs)
                continue
            held = reach[number + 1]
            yield tuple(
                ChunkTransfer(rank, self._partner(rank, number), held[rank], Action.COPY)
                for rank in range(size)
            )

    def _reach(self, num_rounds: int) -> list[list[tuple[int, ...]]]:
        """``reach(r, i)`` for each round i, and after the last, and each rank r."""
        ranks = range(self.num_folded)
        reach: list[list[tuple[int, ...]]] = [[(rank,) for rank in ranks]]
        for number in reversed(range(num_rounds)):
            after = reach[0]
            partners = [self._partner(rank, number) for rank in ranks]
            reach.insert(0, [tuple(sorted(after[r] + after[partners[r]])) for r in ranks])
        return reach

    def _seconds(self, operation: Operation, size_bytes: float, link: LinkCost) -> float:
        inner_s = super()._seconds(operation, size_bytes, link)
        return inner_s + folding_s(self.num_ranks, size_bytes, link)

    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        size = self.num_folded
        num_rounds = size.bit_length() - 1
        if operation is Operation.BROADCAST:
            return num_rounds * link.round_s(1, size_bytes), num_rounds * size_bytes
        fixed_s = num_rounds * (link.latency_s + link.overhead_s)
        sent_bytes = size_bytes * (size - 1) / size
        return fixed_s + sent_bytes * link.s_per_byte, sent_bytes


class HalvingDoubling(Butterfly):
    """Partners by the bits of the rank."""

    name = "halving-doubling"
    summary = "pairs of ranks, ever farther, with ever less: few rounds and the fewest bytes"
    formula = "2 (k (α + o) + nβ (P-1)/P) + γ n (P-1)/P, P = 2ᵏ; other P: 2 (α + o + nβ) + γn more"

    def _partner(self, rank: int, number: int) -> int:
        return rank ^ (1 << number)


class BineButterfly(Butterfly):
    """Partners by the negabinary distances, which are shorter on a ring of ranks."""

    name = "bine"
    summary = "as halving-doubling, with partners nearer in rank: less between groups"
    formula = "as halving-doubling"

    def _partner(self, rank: int, number: int) -> int:
        distance: int = (1 - (-2) ** (number + 1)) // 3
        return (rank + distance if rank % 2 == 0 else rank - distance) % self.num_folded


def folded(
    inner: Iterable[Round], kept: Iterable[int], extra: Iterable[int], chunks: int = 0
) -> Iterator[Round]:
    """A schedule of some ranks, made one of more: each extra rank gives one of them all it has.

    4 ranks of 6      4 --> 0, 5 --> 1  |  the schedule of 0 1 2 3  |  0 --> 4, 1 --> 5
    """
    first = list(kept)
    pairs = list(zip(extra, first, strict=False))
    whole = tuple(range(chunks or len(first)))
    before = tuple(ChunkTransfer(out, own, whole, Action.REDUCE) for out, own in pairs)
    after = tuple(ChunkTransfer(own, out, whole, Action.COPY) for out, own in pairs)
    return chain([before] if pairs else [], inner, [after] if pairs else [])


def folding_s(num_ranks: int, size_bytes: float, link: LinkCost) -> float:
    """What `folded` adds: nothing for a power of two."""
    if floor_power_of_two(num_ranks) == num_ranks:
        return 0.0
    return 2.0 * link.round_s(1, size_bytes) + size_bytes * link.reduce_s_per_byte
