"""hierarchical: first within each host of G ranks, then between hosts, then within hosts again.

    P = 8, G = 4; each row is a host

        host 0    0 - 1 - 2 - 3        1. a ring in each host adds up: its rank i gets part i of G
                  |   |   |   |        2. G rings between the hosts at once, one for each part:
        host 1    4 - 5 - 6 - 7           rank i of every host gets the whole sum of part i
                                       3. a ring in each host spreads the sums

    T = 2 (G - 1) (alpha + o + n beta / G) + 2 (H - 1) (alpha + o + n beta / P)
        + gamma n (P - 1) / P                                                        H = P / G

A host's one link to the others carries 2 (H - 1) / H n bytes each way, as in a ring of hosts, and
only 2 (H - 1) rounds pay the long latency. If links within a host are faster (alpha_1, beta_1)
than the host's link (alpha_2, beta_2), which its G ranks share:
T = 2 (G - 1) (alpha_1 + n beta_1 / G) + 2 (H - 1) (alpha_2 + n beta_2 / H).
P must be a multiple of G.

Source: X. Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision: Training
ImageNet in Four Minutes", arXiv 1807.11205, 2018; H. Mikami et al., "Massively
Distributed SGD", arXiv 1811.05233, 2018 (2D-torus all-reduce: all ranks of a host take part in the
exchange between hosts). Changed: rings on both levels.
"""

from collections.abc import Iterator

from ..errors import ConfigError
from ..fields import NameNumber
from .base import LinkCost, Spreading
from .rings import around
from .transfers import Action, Operation, Round


class HierarchicalRings(Spreading):
    """Rings within hosts and rings between hosts."""

    name = "hierarchical"
    summary = "rings within hosts of G ranks, and G rings between hosts"
    argument = NameNumber(symbol="G", meaning="ranks in a host, side by side", minimum=1)
    formula = "2 (G-1)(α + o + nβ/G) + 2 (H-1)(α + o + nβ/P) + γ n (P-1)/P, H = P/G"
    operations = (Operation.ALL_REDUCE,)

    def __init__(self, num_ranks: int, value: int | None = None) -> None:
        super().__init__(num_ranks, value)
        assert self.value is not None
        self.host_size = self.value
        if num_ranks % self.host_size:
            divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
            nearest = min(divisors, key=lambda size: (abs(size - self.host_size), size))
            raise ConfigError(
                f"hierarchical:{self.host_size} needs a multiple of {self.host_size} ranks, got "
                f"{num_ranks}; try hierarchical:{nearest}, or ring"
            )

    def _second_half(self) -> Operation:
        return Operation.ALL_GATHER

    def _spread(self, operation: Operation, root: int) -> Iterator[Round]:
        size, num_hosts = self.host_size, self.num_ranks // self.host_size
        # Part i consists of chunks i H ... i H + H - 1; chunk i H + h of it belongs to host h.
        between = [
            around(
                range(i, self.num_ranks, size),
                [(i * num_hosts + host,) for host in range(num_hosts)],
                Action.COPY,
            )
            for i in range(size)
        ]
        within = [
            around(
                range(first, first + size),
                [tuple(range(i * num_hosts, (i + 1) * num_hosts)) for i in range(size)],
                Action.COPY,
            )
            for first in range(0, self.num_ranks, size)
        ]
        for level in (between, within):
            for rings in zip(*level, strict=True):
                yield tuple(transfer for ring in rings for transfer in ring)

    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        size, num_hosts = self.host_size, self.num_ranks // self.host_size
        within_s = (size - 1) * link.round_s(1, size_bytes / size)
        between_s = (num_hosts - 1) * link.round_s(1, size_bytes / self.num_ranks)
        return within_s + between_s, size_bytes * (self.num_ranks - 1) / self.num_ranks
