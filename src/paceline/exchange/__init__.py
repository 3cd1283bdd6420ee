"""A member's side of a run: the same verbs whatever carries the bytes.

    base            the contract
    solo            one worker: the user's optimizer on the user's parameters
    through_store   every order comes from the coordinator: every protocol
    peers           its part while an epoch runs among peers, two barriers a round: full-sync and
                    local-sgd, with an averaging:

    averaging       how peers come to a mean and step on it: the contract
    shares          in shared memory, each on its share of the parameters
    share_chunks    what of a share is averaged, kept and stepped on at once
    distributed     through ``torch.distributed``, one accelerator a worker
    late            what of it is under way while members go on
    compressed      its gradients in fewer bytes (`compression/`), and what was not sent yet
    priced          what that costs here, beside what it saves

    lockstep        steps that call the model again, made by all members together

    group           what all members do together with tensors: the contract, torch's own way
    scheduled       a schedule of `collectives/` on tensors

Their parts: member (what a member has: its carrier of words and bytes, its part in checkpoints),
model_copy (what leaves it and comes back), unedited (who else changes it), own_changes (what it
keeps of its own), inbox (what it hears, its jobs), rounds (where peers meet), turns (what the main
one does first), evaluation. None of them knows protocols.

docs/add-a-collective.md shows one averaging more.
"""

import importlib
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:  # the launcher imports this package, and not torch
    from .averaging import Averaging
    from .base import ScriptHooks
    from .model_copy import ModelCopy
    from .rounds import Barrier

FIRST_BUCKET_BYTES: Final = 1 << 20
BUCKET_BYTES: Final = 25 << 20
"""In which parts the ranks of torchrun sum their gradients: the sizes of PyTorch's DDP."""
CPU_BUCKET_BYTES: Final = 4 << 20
"""Between CPUs links are slow: of 25 MB that are through in 2 s (100 Mbit/s) most come after the
backward pass, while 4 MB still take thirty times what it costs to begin them (0.1 ms, loopback)."""


class Route(NamedTuple):
    """How a member was told that the gradients of its peers come together.

    Attributes:
        rendezvous: path of a file that nobody else has, where these members may find each other.
        collective: ``shared``: in memory that all see; ``native``: torch.distributed's own
            all-reduce; or a schedule as `collectives.parse` reads it.
        newest: number of the member that joined last: with another one they are other members.
    """

    rendezvous: str = ""
    collective: str = "shared"
    newest: int = 0

    @property
    def meeting(self) -> str:
        """Path of the file where these very members find each other, and no others have."""
        return f"{self.rendezvous}-{self.newest}"


AVERAGINGS: Final = {
    "peers": "paceline.exchange.shares:SharedAveraging",
    "collective": "paceline.exchange.distributed:DistributedAveraging",
}
"""By the path that a run was told; any other goes by ``peers``. As text: they import torch."""


def make_averaging(
    path: str,
    rendezvous: str,
    copy: "ModelCopy",
    barrier: "Barrier",
    hooks: "ScriptHooks",
    route: Route,
) -> "Averaging":
    """How this member averages with its peers, see `Averaging`."""
    module, _, kind = AVERAGINGS.get(path, AVERAGINGS["peers"]).partition(":")
    averaging: Averaging = getattr(importlib.import_module(module), kind)(
        copy, barrier, hooks, route._replace(rendezvous=rendezvous)
    )
    return averaging
