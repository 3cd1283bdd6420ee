"""tree: a binomial tree: the sum goes up in log P rounds, and down again in as many.

    P = 8, reduce to rank 0 (read down) and broadcast from it (read up)

        0   1   2   3   4   5   6   7
        | <-'   | <-'   | <-'   | <-'      distance 1
        | <-----'       | <-----'          distance 2
        | <-------------'                  distance 4

    T = 2 L (alpha + o + n beta) + gamma n L        L = ceil(log2 P)

The fewest rounds possible with one port, and every message carries the whole buffer: for small
buffers, whose time is mostly alpha. Scatter and gather send over each edge what its subtree holds:
L (alpha + o) + beta n (P - 1) / P.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", International Journal of High Performance Computing Applications 19(1), 2005.

double-tree: two binary trees, each for half of the buffer; no rank has children in both.

    P = 8       first tree                second tree: the first, mirrored
                     7                         0
                   3                             4
                1     5                        6     2
              0  2   4  6                    7  5   3  1     (under 7 and 0: one child each)

    Each half is cut into M segments, which follow one another through their tree. Each edge has one
    of two colours, such that no rank has two edges of one colour to its parents, nor to its
    children; even rounds use the edges of one colour, and odd rounds those of the other.

        round     0     1     2     3     4     5     6
        edge A   s_0         s_1         s_2         s_3
        edge B         s_0         s_1         s_2

    T <= 2 R (alpha + o + n beta / 2M) + gamma R n / 2M,       R = 2 (h + M - 1), h = floor(log2 P);
                                                               for two ranks R = M

With many segments R approaches 2 M, and T approaches 2 n beta with logarithmic latency: close to
the ring's bytes for many ranks. T is an upper bound, since not every path uses every round.

If M is not given, it depends on n: a segment of few bytes costs a latency and saves nothing (16 KiB
in 16 segments between two ranks take 32 rounds of 512 B, a tree 2 rounds). So segments have at
least 64 KiB, and there are at most 16 of them; only one if h < 2, since then no rank passes on what
it received.

Source: P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35(12), 2009; used by NVIDIA's NCCL since 2.4. Changed: both
trees span all ranks, also for an odd P (the second one is the first, shifted by a rank), and the
all-reduce is one after the other, not interleaved.
"""

from collections.abc import Iterator

from ..fields import NameNumber
from .base import Collective, LinkCost, Spreading
from .transfers import Action, ChunkTransfer, Operation, Round

_SEGMENT_BYTES = 1 << 16
"""The least size of a segment if M is not given: on loopback it takes as long as a latency."""
_DEEP = 4
"""The fewest ranks with which a tree has a rank that passes on what it received."""


class BinomialTree(Spreading):
    """Each rank that has the chunks passes them on to a rank half as far away as the one before."""

    name = "tree"
    summary = "binomial tree: the fewest rounds, 2 log P, each with the whole buffer"
    formula = "2 L (α + o + nβ) + γ n L, L = ⌈log₂ P⌉"
    operations = (
        Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE, Operation.SCATTER,
        Operation.GATHER,
    )  # fmt: skip

    def _spread(self, operation: Operation, root: int) -> Iterator[Round]:
        size = self.num_ranks
        span = 1 << ((size - 1).bit_length() - 1)
        while span:
            transfers = []
            for position in range(0, size - span, 2 * span):
                below = range(position + span, min(position + 2 * span, size))
                chunks = range(size) if operation is Operation.BROADCAST else below
                source, destination = (root + position) % size, (root + position + span) % size
                held_chunks = tuple((root + offset) % size for offset in chunks)
                transfers.append(ChunkTransfer(source, destination, held_chunks, Action.COPY))
            yield tuple(transfers)
            span //= 2

    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        num_rounds = (self.num_ranks - 1).bit_length()
        if operation is Operation.SCATTER:
            fixed_s = num_rounds * (link.latency_s + link.overhead_s)
            sent_bytes = size_bytes * (self.num_ranks - 1) / self.num_ranks
            return fixed_s + sent_bytes * link.s_per_byte, 0.0
        return num_rounds * link.round_s(1, size_bytes), num_rounds * size_bytes


class DoubleTree(Spreading):
    """Segments follow one another down two trees; going up is the same schedule run backwards."""

    name = "double-tree"
    summary = "two binary trees, half of the buffer each, in segments: few rounds and few bytes"
    argument = NameNumber(
        symbol="M", meaning="segments that each tree's half is cut into", minimum=1, default=16
    )
    formula = "at most 2R (α + o + nβ/2M) + γ R n/2M, R = 2 (⌊log₂ P⌋ + M - 1)"
    is_bound = True
    operations = (Operation.ALL_REDUCE,)

    def __init__(self, num_ranks: int, value: int | None = None) -> None:
        super().__init__(num_ranks, value)
        self._is_by_size = value is None

    def __str__(self) -> str:
        return self.name if self._is_by_size else f"{self.name}:{self.value}"

    def for_size(self, size_bytes: float) -> Collective:
        if not self._is_by_size:
            return self
        most = self.num_segments if self.num_ranks >= _DEEP else 1
        fitting = int(size_bytes / 2 // _SEGMENT_BYTES)
        return type(self)(self.num_ranks, max(1, min(most, fitting)))

    def num_chunks(self, operation: Operation) -> int:
        return 2 * self.num_segments

    @property
    def num_segments(self) -> int:
        """M, the number of segments that each half is cut into."""
        assert self.value is not None
        return self.value

    def _spread(self, operation: Operation, root: int) -> Iterator[Round]:
        size, num_segments = self.num_ranks, self.num_segments
        edges = two_trees(size)
        colours = coloured(edges)
        first_round: dict[Edge, int] = {}
        for edge in edges:  # from the roots down
            above = edges[edge]
            arrived = -1 if above is None else first_round[above]
            first_round[edge] = arrived + 1 + (arrived + 1 + colours[edge]) % 2
        num_rounds = max(first_round.values()) + 2 * num_segments - 1
        for t in range(num_rounds):
            transfers = []
            for (tree, parent, child), first in first_round.items():
                segment, is_other = divmod(t - first, 2)
                if not is_other and 0 <= segment < num_segments:
                    chunk = (tree * num_segments + segment,)
                    transfers.append(ChunkTransfer(parent, child, chunk, Action.COPY))
            if transfers:
                yield tuple(transfers)

    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        height = self.num_ranks.bit_length() - 1
        num_rounds = 2 * (height + self.num_segments - 1)
        if self.num_ranks == 2:  # one edge in each tree, so the colours do not alternate
            num_rounds = self.num_segments
        segment_bytes = size_bytes / (2 * self.num_segments)
        return num_rounds * link.round_s(1, segment_bytes), num_rounds * segment_bytes


Edge = tuple[int, int, int]  # tree, parent, child


def two_trees(size: int) -> dict[Edge, Edge | None]:
    """Return the edges of both trees from the roots down, each with the edge above it.

    Numbered in order from 1, a place with j trailing zero bits has height j, so every second one is
    a leaf. The second tree is mirrored (P even) or shifted by one (P odd), so that its inner ranks
    are leaves of the first.
    """
    edges: dict[Edge, Edge | None] = {}
    for tree in range(2):
        above: dict[int, Edge] = {}
        places = sorted(range(1, size + 1), key=lambda place: -(place & -place))
        for place in places:
            parent = _parent(place, size)
            if not parent:
                continue
            edge = (tree, _rank(parent, size, tree), _rank(place, size, tree))
            edges[edge] = above.get(parent)
            above[place] = edge
    return edges


def _parent(place: int, size: int) -> int:
    """Return the parent of a place in the in-order tree of places 1 ... size; 0 for the root."""
    bit = place & -place
    up = (place ^ bit) | (bit << 1)
    return up if up <= size else place ^ bit


def _rank(place: int, size: int, tree: int) -> int:
    if not tree:
        return place - 1
    return size - place if size % 2 == 0 else place % size


def coloured(edges: dict[Edge, Edge | None]) -> dict[Edge, int]:
    """Colour edges 0 or 1, so that no rank's edges to its parents, or to its children, are alike.

    The ranks as parents and the ranks as children form a bipartite graph in which no vertex has
    more than two edges; so it consists of paths and even cycles, along which colours alternate.
    """
    sides: dict[tuple[str, int], list[Edge]] = {}
    for edge in edges:
        sides.setdefault(("sends", edge[1]), []).append(edge)
        sides.setdefault(("receives", edge[2]), []).append(edge)
    colours: dict[Edge, int] = {}
    for start in edges:
        pending = [] if start in colours else [(start, 0)]
        while pending:
            edge, colour = pending.pop()
            if edge in colours:
                continue
            colours[edge] = colour
            neighbours = sides["sends", edge[1]] + sides["receives", edge[2]]
            pending += [
                (neighbour, 1 - colour) for neighbour in neighbours if neighbour not in colours
            ]
    return colours
