"""What members compute in virtual time: gradients at what the model holds, each into a seat.

    mini-batches -> one after the other, or in one call (vmap) -> a seat of the store, a loss each

Gradients that are computed in a row are cheaper: what they need of the processor is warm then
(softmax, 64 samples: 125 us each, 175 after an update), and their samples are gathered at once.
Each has the operations and, unless its model draws no random numbers, the random state that it
would have alone, so the order changes no bit. This module must not know versions, members or time.
"""

import cmath
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..data.loader import LeasedLoader
from ..events import Lease
from ..replica.replica import Replica
from ..replica.seeding import draws_nothing
from ..store.parameter_store import SharedStore
from ..workloads.base import Task
from .batched import MOST, Together, num_together

_WAITING_BYTES = 4 << 20
"""Of gradients that are computed ahead, one at a time: large ones are not cheaper in a row."""


class Computed(NamedTuple):
    """A gradient that waits to be pushed."""

    seat: int
    loss: float
    is_finite: bool


def num_seats(slot_bytes: int, num_workers: int, *, is_batched: bool) -> int:
    """Seats where gradients are computed ahead of their push; one is for who pushes now.

    Args:
        is_batched: in one call; that saves time of large ones, too.
    """
    num_ahead = num_workers if is_batched else min(num_workers, _WAITING_BYTES // slot_bytes)
    return 1 + num_ahead if num_ahead > 1 else 1


class Gradients:
    """Gradients of a task at what its model holds.

    Args:
        store: with ``num_seats`` seats; the gradients go there.
        together: computes a row in one call; None: one gradient after the other.
    """

    def __init__(
        self,
        task: Task,
        replica: Replica,
        leased: LeasedLoader,
        store: SharedStore,
        together: Together | None,
    ) -> None:
        self._task = task
        self._replica = replica
        self._leased = leased
        self._store = store
        self._together = together
        is_torchs = getattr(task.loss, "__module__", "") == "torch.nn.functional"
        self._is_seeded = not (is_torchs and draws_nothing(replica.model))
        self._places = replica.layout.parameters.places
        self._views: dict[int, list[torch.Tensor]] = {}
        self._free = list(range(store.control.num_seats))

    def length(self, num_waiting: int) -> int:
        """Of a row for so many: one seat stays free, for a push that was not computed ahead."""
        count = max(1, min(num_waiting, MOST, len(self._free) - 1))
        return num_together(count) if self._together is not None else count

    def row(self, leases: Sequence[Lease]) -> list[Computed]:
        """One gradient for each mini-batch; all are of one size, and at most ``length``."""
        if self._together is not None and len(leases) > 1:
            return self._in_one_call(leases, self._together)
        batches = self._leased.each(leases, is_seeded=self._is_seeded)
        return [self._keep(self._add(batch)) for batch in batches]

    def sum(self, leases: Sequence[Lease]) -> Computed:
        """One gradient, of several mini-batches that a member accumulates."""
        loss = math.nan
        for batch in self._leased.each(leases, is_seeded=self._is_seeded):
            loss = self._add(batch)
        return self._keep(loss)

    def take(self) -> int:
        """A seat for what is computed next."""
        return self._free.pop()

    def free(self, seat: int) -> None:
        """What lies there is in the sum, or will be in no update."""
        self._free.append(seat)

    def _add(self, batch: Any) -> float:
        inputs, targets = batch
        value = self._task.loss(self._replica.model(inputs), targets)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    def _keep(self, loss: float) -> Computed:
        """What was computed goes to a seat of its own."""
        seat = self.take()
        self._replica.turn_to(self._store.slot(seat), self._views_of(seat))
        self._replica.collect(self._store.present(seat))
        self._replica.drop_gradients()
        return Computed(seat, loss, self._store.is_finite(seat))

    def _in_one_call(self, leases: Sequence[Lease], together: Together) -> list[Computed]:
        losses, gradients = together.rows(*self._leased.fetch_together(leases))
        used = [(i, one) for i, one in enumerate(gradients) if one is not None]
        seats = [self.take() for _ in leases]
        views = [self._views_of(seat) for seat in seats]
        into = [row[i] for i, _ in used for row in views]
        torch._foreach_copy_(into, [row for _, one in used for row in one])
        present = bytes(one is not None for one in gradients)
        for seat, row in zip(seats, views, strict=True):
            self._store.present(seat)[:] = present
            if self._replica.buffers:
                self._replica.turn_to(self._store.slot(seat), row)
                self._replica.send()
        # One pass over all of them: a sum is not finite where an entry is not.
        sums = torch.zeros(len(seats))
        for _, one in used:
            sums = sums + one.reshape(len(seats), one[0].numel()).sum(1)
        return [
            Computed(seat, loss, cmath.isfinite(total) or self._store.is_finite(seat))
            for seat, loss, total in zip(seats, losses.tolist(), sums.tolist(), strict=True)
        ]

    def _views_of(self, seat: int) -> list[torch.Tensor]:
        """Where each gradient lies in a seat."""
        views = self._views.get(seat)
        if views is None:
            slot = self._store.slot(seat)
            views = self._views[seat] = [place.view(slot) for place in self._places]
        return views
