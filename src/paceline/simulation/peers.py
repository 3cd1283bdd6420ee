"""Averages real gradients in virtual time as peers do: in member order, share by share.

    push         the gradient is copied aside
    last push    all of the round -> mean, share by share (store/means.py) -> the store's update

The store sums the same gradients in the order of their arrival, which rounds differently. It takes
additional memory for one gradient per worker. This module must not know protocols or time.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..events import Apply, Fact, Order, Pushed
from ..exchange.shares import split_shares
from ..protocols.base import SyncProtocol
from ..store.control import JOBS
from ..store.means import average_into, average_of_buffers
from ..wire.messages import OK
from ..workloads.base import Task
from .training import TrainingWork


class _Part(NamedTuple):
    """A push of one member in the current round."""

    num_samples: int
    slot: Tensor
    present: bytes


class PeersWork(TrainingWork):
    """The work of members that train a task as peers, or through the store.

    Args:
        num_workers: the seats of the run; the other arguments are those of `TrainingWork`.
    """

    def __init__(
        self,
        task: Task,
        protocol: SyncProtocol,
        *,
        num_workers: int,
        batch_size: int,
        lr: float | None = None,
        seed: int = 0,
        nonfinite: str = "error",
    ) -> None:
        super().__init__(
            task, protocol, batch_size=batch_size, lr=lr, seed=seed, nonfinite=nonfinite
        )
        self._num_workers = num_workers
        self._by_peers = False
        self._parts: list[_Part] = []
        self._faults = OK

    def go_by(self, path: str) -> None:
        """Exchange gradients by this path from now on: ``peers`` or ``store``."""
        self._by_peers = path == "peers"

    def rest(self) -> None:
        """Forget pushes that are in no update yet, since the run was cut off here."""
        self._parts, self._faults = [], OK
        self._jobs.forget()

    def carry_out(self, orders: Sequence[Order], fact: Fact) -> None:
        if not self._by_peers:
            super().carry_out(orders, fact)
            return
        if isinstance(fact, Pushed) and self._seat is not None:
            slot, present = self.store.slot(self._seat), self.store.present(self._seat)
            self._parts.append(_Part(fact.num_samples, slot.clone(), bytes(present)))
            self._faults |= self._fault
        self._free_seat()
        for order in orders:
            if isinstance(order, Apply):
                self._update()

    def _update(self) -> None:
        """Make the update of a round in which all members have pushed."""
        store = self.store
        job = store.control[JOBS] + 1
        self._versions.keep()
        if self._faults != OK:
            store.skip(job)
            self._begin_again()
        else:
            seat = self._gradients.take()
            self._average(seat)
            groups = self._rule.param_groups
            store.finish(job, self._updaters, groups, seat=seat, scale=1.0)
            self._gradients.free(seat)
        self._parts, self._faults = [], OK
        self._jobs.jump(store.version)

    def _average(self, seat: int) -> None:
        """Write the mean of the round's gradients and buffers to a seat."""
        total = sum(part.num_samples for part in self._parts)
        weights = [part.num_samples / total for part in self._parts]
        slots = [part.slot for part in self._parts]
        layout, mean = self.replica.layout, self.store.slot(seat)
        for share in split_shares(layout, self._rule, self._num_workers, self._fragments.each):
            for run in share:
                average_into(run.of(mean), [run.of(slot) for slot in slots], weights)
        for place in layout.buffers.places:
            parts = [place.view(slot) for slot in slots]
            place.view(mean).copy_(average_of_buffers(parts, weights))
        self.store.present(seat)[:] = bytes(
            max(column) for column in zip(*(part.present for part in self._parts), strict=True)
        )
