"""halving-doubling: partners twice as far away each round, with half as much to exchange.

    P = 8, reduce-scatter; in round i ranks r and r XOR 2^i send each other the half it keeps

        round 0     0---1    2---3    4---5    6---7       n/2 each way
        round 1     0-------2    1-------3    4-------6    5-------7       n/4
        round 2     0---------------4    1---------------5    2---...      n/8: rank r has chunk r
        all-gather: the same rounds backwards, copying instead of adding

    T = 2 (k (alpha + o) + beta n (P - 1) / P) + gamma n (P - 1) / P        P = 2^k

The fewest bytes in the fewest rounds if P is a power of two. Other P are folded: each rank r from
2^k on first sends its whole buffer to rank r - 2^k, and receives the sum at the end, which costs
2 (alpha + o + n beta) + gamma n more; for such P the all-reduce is the only operation.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", International Journal of High Performance Computing Applications 19(1), 2005
(Rabenseifner's algorithm, with vector halving and distance doubling).

bine: halving-doubling with partners that are nearer on a ring of ranks.

    In round i the partner of rank r is r + d_i if r is even and r - d_i if r is odd, modulo P:
    d_i = (1 - (-2)^(i+1)) / 3 = 1, -1, 3, -5, 11, ...

        P = 8       halving-doubling:  1  2  4 apart          bine:  1  1  3 apart
        round 0     0---1    2---3    4---5    6---7
        round 1     1---2    3---4    5---6    7---0
        round 2     0-----------3    2-----------5    4-----------7    6-----------1

    T = 2 (k (alpha + o) + beta n (P - 1) / P) + gamma n (P - 1) / P        P = 2^k

On a network of identical ranks as fast as halving-doubling. If neighbouring ranks are neighbours in
the network, distances are two thirds as long, so that fewer bytes cross the links between groups.
The chunks of a message do not lie side by side. Other P: as above.

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
    """All ranks exchange in pairs every round; after log P rounds each has data from all others.

    ``reach(r, i)`` is the set of ranks whose data gets to rank r from round i on: r itself, and
    whatever its partners of rounds i, i + 1, ... reach by then. In round i of the reduce-scatter,
    r sends its partner the chunks that the partner reaches from round i + 1 on.
    """

    operations = (
        Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.BROADCAST,
        Operation.REDUCE,
    )  # fmt: skip

    @abc.abstractmethod
    def _partner(self, rank: int, number: int) -> int:
        """Return the partner of a rank below ``num_folded`` in a round of the reduce-scatter."""

    @property
    def num_folded(self) -> int:
        """2^k, the number of ranks that take part in every round."""
        return floor_power_of_two(self.num_ranks)

    def num_chunks(self, operation: Operation) -> int:
        return self.num_folded

    def check(self, operation: Operation) -> None:
        power = self.num_folded
        if power != self.num_ranks and operation is not Operation.ALL_REDUCE:
            alternative = "tree" if operation.has_root else "ring"
            raise ConfigError(
                f"the {operation.value} of {self} needs a power of two ranks, got "
                f"{self.num_ranks}; {power} and {2 * power} fit, or take {alternative}"
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
                holders.update(partner for _, partner in pairs)
                yield tuple(ChunkTransfer(a, b, whole, Action.COPY) for a, b in pairs)
                continue
            chunks = reach[number + 1]
            yield tuple(
                ChunkTransfer(rank, self._partner(rank, number), chunks[rank], Action.COPY)
                for rank in range(size)
            )

    def _reach(self, num_rounds: int) -> list[list[tuple[int, ...]]]:
        """``reach(r, i)`` as a list over rounds i, with one entry more for after the last round."""
        ranks = range(self.num_folded)
        reach: list[list[tuple[int, ...]]] = [[(rank,) for rank in ranks]]
        for number in reversed(range(num_rounds)):
            later = reach[0]
            partners = [self._partner(rank, number) for rank in ranks]
            reach.insert(0, [tuple(sorted(later[r] + later[partners[r]])) for r in ranks])
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
    """Partners whose ranks differ in one bit."""

    name = "halving-doubling"
    summary = "pairs of ranks, ever farther, with ever less: few rounds and the fewest bytes"
    formula = "2 (k (α + o) + nβ (P-1)/P) + γ n (P-1)/P, P = 2ᵏ; other P: 2 (α + o + nβ) + γn more"

    def _partner(self, rank: int, number: int) -> int:
        return rank ^ (1 << number)


class BineButterfly(Butterfly):
    """Partners at negabinary distances, which are shorter on a ring of ranks."""

    name = "bine"
    summary = "as halving-doubling, with partners nearer in rank: less between groups"
    formula = "as halving-doubling"

    def _partner(self, rank: int, number: int) -> int:
        distance: int = (1 - (-2) ** (number + 1)) // 3
        return (rank + distance if rank % 2 == 0 else rank - distance) % self.num_folded


def folded(
    inner: Iterable[Round], kept: Iterable[int], extra: Iterable[int], chunks: int = 0
) -> Iterator[Round]:
    """Extend a schedule by ranks that hand in their whole buffers before it and get sums after it.

    4 ranks of 6      4 --> 0, 5 --> 1  |  the schedule of 0 1 2 3  |  0 --> 4, 1 --> 5

    Args:
        inner: the rounds of the kept ranks.
        kept: the ranks of ``inner``.
        extra: the ranks to add, at most as many as are kept.
        chunks: the number of chunks; 0 means one for each kept rank.
    """
    kept_ranks = list(kept)
    pairs = list(zip(extra, kept_ranks, strict=False))
    whole = tuple(range(chunks or len(kept_ranks)))
    before = tuple(ChunkTransfer(added, host, whole, Action.REDUCE) for added, host in pairs)
    after = tuple(ChunkTransfer(host, added, whole, Action.COPY) for added, host in pairs)
    return chain([before] if pairs else [], inner, [after] if pairs else [])


def folding_s(num_ranks: int, size_bytes: float, link: LinkCost) -> float:
    """Seconds that `folded` adds to a schedule; 0 for a power of two."""
    if floor_power_of_two(num_ranks) == num_ranks:
        return 0.0
    return 2.0 * link.round_s(1, size_bytes) + size_bytes * link.reduce_s_per_byte
