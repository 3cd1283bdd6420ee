"""hub: one rank is the server: all others send to it, and it sends the sum back to all.

    P = 4, R = 0        t=0   1 --> 0 <-- 2        t=1   1 <-- 0 --> 2
                                    ^                          |
                                    3                          3

    T = 2 (alpha + (P - 1) (o + n beta)) + gamma n (P - 1)

Two rounds, and everything goes through one port: a parameter server with one shard. Its time grows
with the number of workers; a ring is measured against it. R is the rank of the server.

Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

fully-connected: each rank is the server of its own chunk.

    P = 3, all-gather     0 --[0]--> 1, 2       1 --[1]--> 0, 2       2 --[2]--> 0, 1

    T = 2 (alpha + (P - 1) o + beta n (P - 1) / P) + gamma n (P - 1) / P

Two rounds and the fewest bytes, at the price of P - 1 messages at once from every rank: for
networks in which each pair has a link of its own, or messages cost little. It is a sharded
parameter server whose shards are the workers.
Its all-to-all is one round: alpha + (P - 1) o + beta n (P - 1) / P.

Source: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory,
practice, and experience", Concurrency and Computation 19(13), 2007.
"""

from collections.abc import Iterator

from ..errors import ConfigError
from ..fields import NameNumber
from .base import LinkCost, Spreading
from .transfers import Action, ChunkTransfer, Operation, Round


class HubServer(Spreading):
    """One rank sends to all others, and receives from all others."""

    name = "hub"
    summary = "one rank adds up for all: two rounds, all bytes through its port"
    argument = NameNumber(symbol="R", meaning="rank of the server", minimum=0, default=0)
    formula = "2 (α + (P-1)(o + nβ)) + γ n (P-1)"
    operations = (
        Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE, Operation.SCATTER,
        Operation.GATHER,
    )  # fmt: skip

    def __init__(self, num_ranks: int, value: int | None = None) -> None:
        super().__init__(num_ranks, value)
        assert self.value is not None
        self._hub = self.value
        if self._hub >= num_ranks:
            raise ConfigError(
                f"hub:R needs R < {num_ranks}, the number of ranks, got hub:{self._hub}; "
                f"try hub:{num_ranks - 1}"
            )

    def num_ports(self, operation: Operation) -> int:
        return max(1, self.num_ranks - 1)

    def _spread(self, operation: Operation, root: int) -> Iterator[Round]:
        ranks = range(self.num_ranks)
        whole = operation is Operation.BROADCAST
        yield tuple(
            ChunkTransfer(root, r, tuple(ranks) if whole else (r,), Action.COPY)
            for r in ranks
            if r != root
        )

    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        others = self.num_ranks - 1
        whole = operation is Operation.BROADCAST
        each_bytes = size_bytes if whole else size_bytes / self.num_ranks
        return link.round_s(others, others * each_bytes), others * each_bytes


class FullyConnected(Spreading):
    """Every rank sends its chunk to every other rank at once."""

    name = "fully-connected"
    summary = "each rank adds up its own chunk for all: two rounds, P - 1 messages at once"
    formula = "2 (α + (P-1) o + nβ (P-1)/P) + γ n (P-1)/P"
    operations = (
        Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL,
    )  # fmt: skip

    def num_ports(self, operation: Operation) -> int:
        return max(1, self.num_ranks - 1)

    def _spread(self, operation: Operation, root: int) -> Iterator[Round]:
        size = self.num_ranks
        is_all_to_all = operation is Operation.ALL_TO_ALL
        yield tuple(
            ChunkTransfer(r, other, (r * size + other if is_all_to_all else r,), Action.COPY)
            for r in range(size)
            for other in range(size)
            if other != r
        )

    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        others = self.num_ranks - 1
        sent_bytes = others * size_bytes / self.num_ranks
        return link.round_s(others, sent_bytes), sent_bytes
