"""Steps of one's own in virtual time: what a member of local-sgd does between two averages.

    the version's parameters -> H steps with the member's own optimizer -> what they changed

Each member's optimizer keeps its state from one push to the next, as its process would. This module
must not know versions or time.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..data.loader import LeasedLoader
from ..events import Lease
from ..replica.replica import Replica
from ..store.parameter_store import SharedStore
from ..workloads.base import Task


class LocalSteps:
    """What members change by themselves.

    Six arguments: it is all of a member but what decides.

    Args:
        home: the model's memory.
        make_optimizer: for the model; one a member.
    """

    def __init__(
        self,
        task: Task,
        replica: Replica,
        home: Tensor,
        leased: LeasedLoader,
        store: SharedStore,
        make_optimizer: Callable[[], Optimizer],
    ) -> None:
        self._task = task
        self._replica = replica
        self._home = home
        self._leased = leased
        self._store = store
        self._make_optimizer = make_optimizer
        self._own: dict[int, Optimizer] = {}
        self._base = torch.empty_like(home)

    def take(self, member: int, leases: Sequence[Lease], seat: int) -> float:
        """A step for each mini-batch; the difference goes to the seat. Returns the last loss."""
        optimizer = self._own.get(member)
        if optimizer is None:
            optimizer = self._own[member] = self._make_optimizer()
        self._base.copy_(self._home)
        loss = math.nan
        for inputs, targets in self._leased.each(leases):
            optimizer.zero_grad()
            value = self._task.loss(self._replica.model(inputs), targets)
            loss = float(value.detach())
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        slot, layout = self._store.slot(seat), self._replica.layout
        for dtype, start, stop in layout.parameters.runs():
            before, after, out = (
                block[start:stop].view(dtype) for block in (self._base, self._home, slot)
            )
            torch.sub(before, after, out=out)
        layout.buffers.of(slot).copy_(layout.buffers.of(self._home))
        present = self._store.present(seat)
        present[:] = b"\1" * len(present)
        return loss
