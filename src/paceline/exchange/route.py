"""By which way the gradients of a run's peers come together, as its members were told.

This module must not know torch: whoever begins members imports it, too.
"""

from typing import Final, NamedTuple

FIRST_BUCKET_BYTES: Final = 1 << 20
BUCKET_BYTES: Final = 25 << 20
"""In which parts the ranks of torchrun sum their gradients: the sizes of PyTorch's DDP."""
CPU_BUCKET_BYTES: Final = 4 << 20
"""Between CPUs links are slow: of 25 MB that are through in 2 s (100 Mbit/s) most come after the
backward pass, while 4 MB still take thirty times what it costs to begin them (0.1 ms, loopback)."""


class Route(NamedTuple):
    """What `make_averaging` makes an averaging of.

    Attributes:
        rendezvous: path of a file that no other run has, where members may find each other.
        collective: ``shared``: in memory that all see; ``native``: torch.distributed's own
            all-reduce; or a schedule as `collectives.parse` reads it.
    """

    rendezvous: str = ""
    collective: str = "shared"
