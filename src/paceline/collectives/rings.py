"""ring: each rank passes chunks on to the next, first adding them up, then spreading the sums.

    P = 4, chunks 0..3; in round t each rank sends the chunk that it received in round t - 1

        rank   0 ---> 1 ---> 2 ---> 3 ---> 0         [i] is the sum of chunk i so far

        reduce-scatter  t=0   0 [3] 1    1 [0] 2    2 [1] 3    3 [2] 0
                        t=1   0 [2] 1    1 [3] 2    2 [0] 3    3 [1] 0
                        t=2   0 [1] 1    1 [2] 2    2 [3] 3    3 [0] 0     rank r has the sum of r
        all-gather      t=3   0 [0] 1    1 [1] 2    2 [2] 3    3 [3] 0
                        t=4   0 [3] 1    1 [0] 2    2 [1] 3    3 [2] 0
                        t=5   0 [2] 1    1 [3] 2    2 [0] 3    3 [1] 0

    T = 2 (P - 1) (alpha + o + n beta / P) + gamma n (P - 1) / P

Each rank sends 2 (P - 1) n / P bytes, the least that any all-reduce can, and only to its
neighbour. As the ring grows the bytes per rank hardly do, but the rounds do.

Source: P. Patarasu, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", Journal of Parallel and Distributed Computing 69(2), 2009.

bidirectional-ring: each chunk goes both ways round, half as far.

    P = 5, an all-gather; the chunk of rank 2        0 <---- 1 <---- 2 ----> 3 ----> 4
                                                        t=1     t=0     t=0     t=1

    T = 2 floor((P - 1) / 2) (alpha + 2 o + 2 n beta / P) + gamma n (P - 1) / P
        and, where P is even, 2 (alpha + o + n beta / P) more

Half the rounds of the ring, and the same bytes through one port. If there is a link to each of the
two neighbours, the bytes of a round go through both at once, and take n beta / P.

Source: E. Chan, R. van de Geijn, W. Gropp, R. Thakur, "Collective communication on architectures
that support simultaneous communication over multiple links", PPoPP 2006. The reduce-scatter is the
all-gather run backwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ..errors import ConfigError
from .base import LinkCost, Spreading
from .transfers import Action, ChunkTransfer, Operation, Round

COPY = Action.COPY
SPREADING = (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER)


class RingAllReduce(Spreading):
    """A reduce-scatter round the ring, then an all-gather in the same direction."""

    name = "ring"
    summary = "chunks go round: the fewest bytes, 2 (P - 1) rounds"
    formula = "2 (P-1) (α + o + nβ/P) + γ n (P-1)/P"
    operations = SPREADING

    def _rounds(self, operation: Operation, root: int) -> Iterable[Round]:
        ranks = range(self.num_ranks)
        adding = around(ranks, [(chunk,) for chunk in ranks], Action.REDUCE)
        if operation is Operation.REDUCE_SCATTER:
            return adding
        spreading = self._spread(operation, root)
        return spreading if operation is Operation.ALL_GATHER else chain(adding, spreading)

    def _spread(self, operation: Operation, root: int) -> Iterator[Round]:
        ranks = range(self.num_ranks)
        return around(ranks, [(chunk,) for chunk in ranks], COPY)

    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        num_rounds = self.num_ranks - 1
        round_s = link.round_s(1, size_bytes / self.num_ranks)
        return num_rounds * round_s, num_rounds * size_bytes / self.num_ranks


class BidirectionalRing(Spreading):
    """Every chunk spreads in both directions at once."""

    name = "bidirectional-ring"
    summary = "chunks go both ways round: half the rounds, two messages at once"
    formula = "2 ⌊(P-1)/2⌋ (α + 2o + 2nβ/P) + γ n (P-1)/P; P even: 2 (α + o + nβ/P) more"
    operations = SPREADING

    def num_ports(self, operation: Operation) -> int:
        return 2

    def _spread(self, operation: Operation, root: int) -> Iterator[Round]:
        size = self.num_ranks
        for t in range(size // 2):
            right = [ChunkTransfer(r, (r + 1) % size, ((r - t) % size,), COPY) for r in range(size)]
            left = [ChunkTransfer(r, (r - 1) % size, ((r + t) % size,), COPY) for r in range(size)]
            yield tuple(right + left) if t < (size - 1) // 2 else tuple(right)

    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        num_both, chunk_bytes = (self.num_ranks - 1) // 2, size_bytes / self.num_ranks
        spread_s = num_both * link.round_s(2, 2.0 * chunk_bytes)
        if self.num_ranks % 2 == 0:
            spread_s += link.round_s(1, chunk_bytes)
        return spread_s, (self.num_ranks - 1) * chunk_bytes


class ParallelRings(RingAllReduce):
    """Several rings at once, each with an equal part of the buffer, laid out for a topology.

    Of k rings, ring j has chunk r k + j for rank r. This collective has no name on the command
    line: a search finds its rings (`ring_search.planned_rings`).

    Args:
        rings: at least one; each is an order of all ranks.
    """

    name = "parallel-rings"
    summary = "k rings that were found in a topology, each with a part of the buffer"
    formula = "2 (P-1) (α + ko + nβ/P) + γ n (P-1)/P"

    def __init__(self, rings: Sequence[Sequence[int]]) -> None:
        super().__init__(len(rings[0]) if rings else 0)
        self.rings = tuple(tuple(ring) for ring in rings)
        for ring in self.rings:
            if sorted(ring) != list(range(self.num_ranks)):
                raise ConfigError(
                    f"a ring holds each of {self.num_ranks} ranks once, got {list(ring)}"
                )

    def __str__(self) -> str:
        prefix = f"{len(self.rings)} rings, the first " if len(self.rings) > 1 else "ring "
        return prefix + "-".join(str(rank) for rank in self.rings[0])

    def num_chunks(self, operation: Operation) -> int:
        return self.num_ranks * len(self.rings)

    def num_ports(self, operation: Operation) -> int:
        return len(self.rings)

    def _rounds(self, operation: Operation, root: int) -> Iterator[Round]:
        actions = {
            Operation.REDUCE_SCATTER: (Action.REDUCE,),
            Operation.ALL_GATHER: (COPY,),
            Operation.ALL_REDUCE: (Action.REDUCE, COPY),
        }[operation]
        num_rings = len(self.rings)
        for action in actions:
            schedules = [
                around(ring, [(rank * num_rings + j,) for rank in ring], action)
                for j, ring in enumerate(self.rings)
            ]
            for rounds in zip(*schedules, strict=True):
                yield tuple(chain.from_iterable(rounds))

    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        num_rounds = self.num_ranks - 1
        round_s = link.round_s(len(self.rings), size_bytes / self.num_ranks)
        return num_rounds * round_s, num_rounds * size_bytes / self.num_ranks


def around(
    ranks: Sequence[int], parts: Sequence[tuple[int, ...]], action: Action
) -> Iterator[Round]:
    """Yield the rounds that pass parts of the buffer once round a ring.

    Args:
        ranks: in the order of the ring.
        parts: the chunks of each part; one part for each rank.
        action: reduce: the rank at index i ends with the sum of part i; copy: it begins with part
            i and ends with all parts.
    """
    size = len(ranks)
    ahead = 1 if action is Action.REDUCE else 0
    for t in range(size - 1):
        yield tuple(
            ChunkTransfer(rank, ranks[(i + 1) % size], parts[(i - t - ahead) % size], action)
            for i, rank in enumerate(ranks)
        )
