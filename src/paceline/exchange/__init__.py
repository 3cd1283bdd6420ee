"""A member's side of a run: the same verbs whatever carries the bytes.

    base            the contract
    solo            one worker: the user's optimizer on the user's parameters
    through_store   every order comes from the coordinator: every protocol
    peers           its part while an epoch runs among peers, two barriers a round: full-sync and
                    local-sgd, with an averaging:

    averaging       how peers compute a mean and step on it: the contract
    shares          in shared memory, each on its share of the parameters
    share_chunks    the part of a share that is averaged, kept and stepped on at once
    distributed     through ``torch.distributed``, one accelerator a worker
    late            a mean that is computed while members go on
    compressed      its gradients in fewer bytes (`compression/`), and the residual
    priced          what compression costs here, and what it saves

    lockstep        steps that call the model again, made by all members together

    group           what all members do together with tensors: the contract, torch's own way
    scheduled       a schedule of `collectives/` on tensors
    mapped          messages and collectives in memory that processes of one machine map

Their parts: member (its carrier of words and bytes, its part in checkpoints), model_copy (what goes
to the store and comes back), unedited (who else changes the weights), own_changes (local changes
not yet exchanged), inbox (messages and jobs), rounds (lines and barriers of peers), turns (what the
main member does first), evaluation. None of them knows protocols.

docs/add-a-collective.md shows how to add an averaging.
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
"""Sizes of the parts in which the ranks of torchrun sum their gradients: those of PyTorch's DDP."""
CPU_BUCKET_BYTES: Final = 4 << 20
"""Links between CPUs are slow: of 25 MB, which take 2 s at 100 Mbit/s, most arrive after the
backward pass, while 4 MB still take thirty times what it costs to start them (0.1 ms, loopback)."""


SHARED: Final = "shared"
"""The collective that sums in memory which all members see."""


class Route(NamedTuple):
    """How the gradients of peers are summed, as the run told this member.

    Attributes:
        rendezvous: path of a file of this run alone, where its members may find each other.
        collective: ``shared``: in memory that all see; ``native``: torch.distributed's own
            all-reduce; or a schedule as `collectives.parse` reads it.
        newest: number of the member that joined last; a different one means different members.
    """

    rendezvous: str = ""
    collective: str = SHARED
    newest: int = 0

    @property
    def meeting(self) -> str:
        """Path of the file where exactly these members find each other."""
        return f"{self.rendezvous}-{self.newest}"


AVERAGINGS: Final = {
    "peers": "paceline.exchange.shares:SharedAveraging",
    "collective": "paceline.exchange.distributed:DistributedAveraging",
}
"""By the run's path; any other path uses ``peers``. As text, since they import torch."""


def make_averaging(
    path: str,
    rendezvous: str,
    copy: "ModelCopy",
    barrier: "Barrier",
    hooks: "ScriptHooks",
    route: Route,
) -> "Averaging":
    """Return how this member averages with its peers, see `Averaging`."""
    module, _, kind = AVERAGINGS.get(path, AVERAGINGS["peers"]).partition(":")
    averaging: Averaging = getattr(importlib.import_module(module), kind)(
        copy, barrier, hooks, route._replace(rendezvous=rendezvous)
    )
    return averaging
