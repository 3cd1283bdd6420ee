"""straggler-aware: the others add up while they wait for rank R, which then meets each of them.

    P = n = 2^k, R = S; the other n - 1 ranks are 0 ... n - 2, and chunk i of n - 1 is rank i's

        while S computes   a ring of the others: rank i has the sum of chunk i but for S's part
        S is there         n = 4:   t=0        t=1           t=2           t=3
                           meet     S <-0-> 0  S <-1-> 1     S <-2-> 2     S --2--> 0
                           spread              0 --0--> 2    1 --1--> 0    2 --2--> 1
                                                             0 --0--> 1    1 --1--> 2

    1. meet: in round t rank S and rank t give each other chunk t, and both have its sum.
    2. spread: who has a sum tells one more rank a round, so that chunk t is with 1, 2, 4, ... of
       the others in the rounds after. Ranks other than the one that meets S are in pairs: one has
       a young chunk, of t - 1 ... t - k + 1, and the other the old one, t - k; they give each
       other what they have. So everybody sends one message and receives one.
    3. after t = n - 2 there is no one left to meet: S spreads chunk n - 2, too.

    Who is whose partner: let x be a rank less t, modulo n - 1, and lay "types" round the ring of x
    downwards from x = -1, in runs: 1 2 ... k, then 2 ... k, then 3 ... k twice, j ... k 2^(j-2)
    times. Type j at x means: it has chunk t - j, and not chunk t - k unless j = k. One round later
    the same rank is x - 1, and has the next type. So a rank of type j < k tells its chunk to one of
    type k below which a run begins with j + 1: there are as many of the one as of the other.

    T = (n + k - 2) (alpha + o + beta n_bytes / (n - 1)) + gamma n_bytes     from when S is there;
        with the ring of the others before it, which is hidden where S is that late,
        (n - 2) (alpha + o + (beta + gamma) n_bytes / (n - 1)) more

About half of a ring's 2 (n - 1) rounds of n_bytes / n. Other numbers of ranks are folded: each rank
beyond 2^k first gives another one all it has, which is hidden as well, and is told the sum at the
end, alpha + o + beta n_bytes. With nobody late it loses to a ring by what is not hidden.

Source: A. Devraj, E. Ding, A. Vijaya Kumar, R. Kleinberg, R. Singh, "Efficient AllReduce with
Stragglers" (StragglAR), arXiv 2505.23523, 2025: the idea, and the number of rounds for powers of
two. Changed: partners by the runs above instead of a synthesised table, and folding.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from ..errors import ConfigError
from ..fields import NameNumber
from .base import Collective, LinkCost
from .butterflies import folded, folding_s
from .rings import around
from .transfers import Action, ChunkTransfer, Operation, Round, floor_power_of_two


class StragglerAware(Collective):
    """The others reduce-scatter; the late one meets each owner while the rest spread sums."""

    name = "straggler-aware"
    summary = "the others add up while rank R is late, which costs half as much when it comes"
    argument = NameNumber(symbol="R", meaning="rank that comes late", minimum=0)
    formula = (
        "(P+k-2)(α + o + nβ/(P-1)) + γn once R is there, P = 2ᵏ, and before it "
        "(P-2)(α + o + n(β+γ)/(P-1))"
    )
    operations = (Operation.ALL_REDUCE,)

    def __init__(self, num_ranks: int, value: int | None = None) -> None:
        super().__init__(num_ranks, value)
        assert self.value is not None
        self.late = self.value
        if self.late >= num_ranks:
            raise ConfigError(
                f"straggler-aware:R needs R < {num_ranks}, the number of ranks, got "
                f"straggler-aware:{self.late}; try straggler-aware:{num_ranks - 1}"
            )
        num_folded = floor_power_of_two(num_ranks)
        present = [rank for rank in range(num_ranks) if rank != self.late]
        self.others, self.extra = present[: num_folded - 1], present[num_folded - 1 :]

    def num_chunks(self, operation: Operation) -> int:
        return max(1, len(self.others))

    def _rounds(self, operation: Operation, root: int) -> Iterable[Round]:
        parts = [(chunk,) for chunk in range(len(self.others))]
        adding = around(self.others, parts, Action.REDUCE)
        inner = chain(adding, self._meetings())
        return folded(inner, self.others, self.extra, chunks=len(parts))

    def _meetings(self) -> Iterator[Round]:
        """Parts 1 to 3 of the drawing."""
        size = len(self.others)  # n - 1
        num_types = size.bit_length()  # k
        pairs = _pairs(num_types)
        for t in range(size + num_types - 1):
            met, rank = t if t < size else None, self.others[t % size]
            if met is not None:
                transfers = [
                    ChunkTransfer(self.late, rank, (met,), Action.REDUCE),
                    ChunkTransfer(rank, self.late, (met,), Action.REDUCE),
                ]
            else:
                transfers = [ChunkTransfer(self.late, rank, (size - 1,), Action.COPY)]
            for young, old, kind in pairs:
                one, other = self.others[(young + t) % size], self.others[(old + t) % size]
                told = min(t - kind, size - 1)  # where chunks have run out: the last one again
                if told >= 0:
                    transfers.append(ChunkTransfer(one, other, (told,), Action.COPY))
                if t - num_types >= 0:
                    transfers.append(ChunkTransfer(other, one, (t - num_types,), Action.COPY))
            yield tuple(transfers)

    def after_arrival_s(self, size_bytes: float, link: LinkCost) -> float:
        """The formula from when the late rank comes, if the others are done with their part."""
        if self.num_ranks == 1:
            return 0.0
        size = len(self.others)
        num_rounds = size + size.bit_length() - 1
        meeting_s = num_rounds * link.round_s(1, size_bytes / size)
        told_s = link.round_s(1, size_bytes) if self.extra else 0.0
        return meeting_s + size_bytes * link.reduce_s_per_byte + told_s

    def _seconds(self, operation: Operation, size_bytes: float, link: LinkCost) -> float:
        size = len(self.others)
        chunk_bytes = size_bytes / size
        ring_round_s = link.round_s(1, chunk_bytes) + chunk_bytes * link.reduce_s_per_byte
        told_s = link.round_s(1, size_bytes) if self.extra else 0.0
        folding = folding_s(self.num_ranks, size_bytes, link) - told_s
        return folding + (size - 1) * ring_round_s + self.after_arrival_s(size_bytes, link)


def _pairs(num_types: int) -> list[tuple[int, int, int]]:
    """Who exchanges with whom in every round: (place of the young, of the old, type of the young).

    Places are ranks less t. Place 0 is the rank that meets S, and in no pair.

    Example:
        >>> _pairs(2)
        [(-1, -2, 1)]
    """
    size = (1 << num_types) - 1
    begins = [1] + [j for j in range(2, num_types + 1) for _ in range(1 << (j - 2))]
    young: dict[int, list[int]] = {}
    old: dict[int, list[int]] = {}
    place = 0
    for begin in begins:
        # The place above a run's first one is of type k; above the first run it is place 0.
        if begin > 1:
            old.setdefault(begin - 1, []).append(place)
        for kind in range(begin, num_types + 1):
            place -= 1
            if kind < num_types:
                young.setdefault(kind, []).append(place)
    assert place == -size
    return [
        (one, other, kind)
        for kind in sorted(young)
        for one, other in zip(young[kind], old[kind], strict=True)
    ]
