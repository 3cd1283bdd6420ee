"""What members compute in virtual time: gradients at one version, each into a seat of the store.

    mini-batches of members at one version -> in a row, or together (vmap) -> a seat, a loss each

Members that hold the same version are computed in a row, also when only one of them pushes now:
what a gradient needs of the processor is warm then (softmax, 64 samples: 125 us a gradient in a
row, 175 after an update), and their samples are gathered at once. Each is computed with the very
operations and the random state of a live run, so the order changes no bit. This module must not
know versions, members or time.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..compute.replica import Replica
from ..compute.seeding import draws_nothing
from ..data.loader import LeasedLoader
from ..events import Lease
from ..store.shared import SharedStore
from ..workloads.base import Task
from .batching import Together, num_together

MOST_IN_A_ROW = 16
_ROW_BYTES = 4 << 20
"""Gradients of a row: larger ones are not cheaper for being computed in a row."""


class Computed(NamedTuple):
    """A gradient that waits to be pushed."""

    seat: int
    loss: float
    is_finite: bool


def num_seats(slot_bytes: int, num_workers: int, *, is_batched: bool) -> int:
    """Seats for the gradients that are computed and in no update yet."""
    most = MOST_IN_A_ROW if is_batched else min(MOST_IN_A_ROW, _ROW_BYTES // slot_bytes)
    return 1 + min(num_workers, most)


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
        places = replica.layout.parameters.places
        self._slots = [store.slot(seat) for seat in range(store.control.num_seats)]
        self._views = [[place.view(slot) for place in places] for slot in self._slots]
        self._free = list(range(len(self._slots)))

    @property
    def room(self) -> int:
        """How many may go in a row: a seat is left for who pushes next, and is in none."""
        return max(1, len(self._free) - 1)

    def free(self, seat: int) -> None:
        """What lay there is in the sum, or in no update ever."""
        self._free.append(seat)

    def row(self, leases: Sequence[Lease]) -> list[Computed]:
        """One gradient for each mini-batch; all are of one size, and at most ``room``."""
        if self._together is not None and len(leases) > 1:
            return self._in_one_call(leases, self._together)
        return [
            self._keep(self._add(batch))
            for batch in self._leased.each(leases, is_seeded=self._is_seeded)
        ]

    def sum(self, leases: Sequence[Lease]) -> Computed:
        """One gradient, of several mini-batches that a member accumulates."""
        loss = math.nan
        for batch in self._leased.each(leases, is_seeded=self._is_seeded):
            loss = self._add(batch)
        return self._keep(loss)

    def take_seat(self) -> int:
        """A seat that the replica's next push goes to."""
        seat = self._free.pop()
        self._replica.turn_to(self._slots[seat], self._views[seat])
        return seat

    def _add(self, batch: Any) -> float:
        inputs, targets = batch
        value = self._task.loss(self._replica.model(inputs), targets)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    def _keep(self, loss: float) -> Computed:
        """What was computed goes to a seat of its own."""
        seat = self.take_seat()
        self._replica.collect(self._store.present(seat))
        self._replica.drop_gradients()
        return Computed(seat, loss, self._store.is_finite(seat))

    def _in_one_call(self, leases: Sequence[Lease], together: Together) -> list[Computed]:
        losses, gradients = together.rows(*self._leased.fetch_together(leases))
        used = [(i, one) for i, one in enumerate(gradients) if one is not None]
        seats = [self._free.pop() for _ in leases]
        into = [self._views[seat][i] for i, _ in used for seat in seats]
        torch._foreach_copy_(into, [row for _, one in used for row in one])
        present = bytes(one is not None for one in gradients)
        for seat in seats:
            self._store.present(seat)[:] = present
        # One pass over all of them: a sum is not finite where an entry is not.
        sums = torch.stack([one.flatten(1).sum(1) for _, one in used]).sum(0)
        return [
            Computed(seat, loss, math.isfinite(total) or self._store.is_finite(seat))
            for seat, loss, total in zip(seats, losses.tolist(), sums.tolist(), strict=True)
        ]


def num_in_a_row(num_waiting: int, room: int, *, is_batched: bool) -> int:
    """How many of the members that wait at a version are computed now."""
    count = min(num_waiting, room)
    return num_together(count) if is_batched else count
