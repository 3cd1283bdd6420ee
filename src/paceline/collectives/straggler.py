"""straggler-aware: the others add up while they wait for rank R, which then meets each of them.

    P = n = 2^k, R = S; the other n - 1 ranks are 0 ... n - 2, and of n - 1 chunks rank i owns i

        while S computes   a ring of the others: rank i gets the sum of chunk i without S's part
        S is ready         n = 4:   t=0        t=1           t=2           t=3
                           meet     S <-0-> 0  S <-1-> 1     S <-2-> 2     S --2--> 0
                           spread              0 --0--> 2    1 --1--> 0    2 --2--> 1
                                                             0 --0--> 1    1 --1--> 2

    1. meet: in round t ranks S and t exchange chunk t, and both have its sum.
    2. spread: each rank with a sum sends it to one more rank per round, so that in the following
       rounds 1, 2, 4, ... of the others have chunk t. The ranks other than the one that meets S
       form pairs: one has a young chunk, one of t - 1 ... t - k + 1, the other the old one, t - k,
       and they exchange them. So every rank sends one message and receives one.
    3. after t = n - 2 there is no rank left to meet: S helps to spread chunk n - 2.

    The pairs: let x be a rank minus t, modulo n - 1, and lay "types" round the ring of x
    downwards from x = -1, in runs: 1 2 ... k, then 2 ... k, then 3 ... k twice, j ... k 2^(j-2)
    times. Type j at x means that the rank has chunk t - j, and not chunk t - k unless j = k. One
    round later the same rank is at x - 1, and has the next type. So a rank of type j < k sends its
    chunk to one of type k below which a run begins with j + 1: there are equally many of both.

    T = (n + k - 2) (alpha + o + beta n_bytes / (n - 1)) + gamma n_bytes     from when S is ready;
        the ring of the others before it, which is hidden if S is late enough, takes
        (n - 2) (alpha + o + (beta + gamma) n_bytes / (n - 1)) more

About half of a ring's 2 (n - 1) rounds of n_bytes / n. Other numbers of ranks are folded: each rank
beyond 2^k first sends its whole buffer to another one, which is hidden as well, and receives the
sum at the end, alpha + o + beta n_bytes. If no rank is late, it is slower than a ring by what is
then not hidden.

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
    """The others reduce-scatter; the late rank meets each owner while the rest spread sums."""

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
        """Yield the rounds of parts 1 to 3 of the drawing."""
        num_others = len(self.others)  # n - 1
        num_types = num_others.bit_length()  # k
        pairs = _pairs(num_types)
        for t in range(num_others + num_types - 1):
            chunk, rank = t if t < num_others else None, self.others[t % num_others]
            if chunk is not None:
                transfers = [
                    ChunkTransfer(self.late, rank, (chunk,), Action.REDUCE),
                    ChunkTransfer(rank, self.late, (chunk,), Action.REDUCE),
                ]
            else:
                transfers = [ChunkTransfer(self.late, rank, (num_others - 1,), Action.COPY)]
            for young, old, kind in pairs:
                a, b = self.others[(young + t) % num_others], self.others[(old + t) % num_others]
                young_chunk = min(t - kind, num_others - 1)  # after the last chunk: that one again
                if young_chunk >= 0:
                    transfers.append(ChunkTransfer(a, b, (young_chunk,), Action.COPY))
                if t - num_types >= 0:
                    transfers.append(ChunkTransfer(b, a, (t - num_types,), Action.COPY))
            yield tuple(transfers)

    def after_arrival_s(self, size_bytes: float, link: LinkCost) -> float:
        """Seconds by the formula from when the late rank is ready, if the others are done by then.

        Args:
            size_bytes: of the whole buffer.
        """
        if self.num_ranks == 1:
            return 0.0
        num_others = len(self.others)
        num_rounds = num_others + num_others.bit_length() - 1
        meeting_s = num_rounds * link.round_s(1, size_bytes / num_others)
        unfold_s = link.round_s(1, size_bytes) if self.extra else 0.0
        return meeting_s + size_bytes * link.reduce_s_per_byte + unfold_s

    def _seconds(self, operation: Operation, size_bytes: float, link: LinkCost) -> float:
        num_others = len(self.others)
        chunk_bytes = size_bytes / num_others
        ring_round_s = link.round_s(1, chunk_bytes) + chunk_bytes * link.reduce_s_per_byte
        unfold_s = link.round_s(1, size_bytes) if self.extra else 0.0
        fold_s = folding_s(self.num_ranks, size_bytes, link) - unfold_s
        return fold_s + (num_others - 1) * ring_round_s + self.after_arrival_s(size_bytes, link)


def _pairs(num_types: int) -> list[tuple[int, int, int]]:
    """Return the pairs that exchange chunks in every round.

    Returns:
        For each pair: the place of the rank with the young chunk, the place of the rank with the
        old one, and the type of the young one. A place is a rank minus t; place 0 is the rank
        that meets S, which is in no pair.

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
        # The place above the start of a run is of type k; above the first run it is place 0.
        if begin > 1:
            old.setdefault(begin - 1, []).append(place)
        for kind in range(begin, num_types + 1):
            place -= 1
            if kind < num_types:
                young.setdefault(kind, []).append(place)
    assert place == -size
    return [
        (young_place, old_place, kind)
        for kind in sorted(young)
        for young_place, old_place in zip(young[kind], old[kind], strict=True)
    ]
