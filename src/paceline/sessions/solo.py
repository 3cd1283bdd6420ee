"""A session of one worker in its own process: the user's optimizer on the user's parameters.

Nothing is copied, sent or written: ``python train.py`` costs what the bare loop costs. This
module must not know stores or processes.
"""

import time
from collections.abc import Sequence

from ..events import Grant, Lease, Ticket
from .base import Census, Session, Shape, Work
from .census import LocalCensus


class SoloSession(Session):
    """One worker, no coordinator: leases in order, every push is its own update."""

    def __init__(self) -> None:
        self._leases: list[Lease] = []
        self._next = 0
        self._version = 0
        self._skipped = 0
        self._grant: Grant | None = None
        self._held: list[Lease] = []
        self.begun_s = time.perf_counter()

    def shape(self, shape: Shape) -> None:
        """Set what an epoch is."""
        self._shape = shape

    def open_epoch(self, epoch: int, batch_ends: Sequence[int] | None) -> bool:
        self._leases = self._shape.batches(batch_ends).cut_all(epoch)
        self._next = 0
        self._told = 0
        self._advance()
        return True

    def _advance(self) -> None:
        if self._next < len(self._leases):
            ticket = Ticket(0, self._version, self._version)
            self._held = [self._leases[self._next]]
            self._grant = Grant(ticket, (self._held[0],))
            self._next += 1
        else:
            self._grant = None

    def grant(self) -> Grant | None:
        return self._grant

    def push(self, work: Work) -> None:
        self._version += 1
        self._advance()

    def skip(self, work: Work) -> None:
        """As ``push``, for an update that changed nothing."""
        self._skipped += 1
        self.push(work)

    def applied(self, version: int) -> int:
        return version - self._skipped

    def extend(self) -> Lease | None:
        if self._next >= len(self._leases):
            return None
        self._next += 1
        self._held.append(self._leases[self._next - 1])
        return self._held[-1]

    def give_back(self) -> None:
        returned = self._held
        self._advance()
        self._leases[self._next : self._next] = returned
        if self._grant is None:
            self._advance()

    def upcoming(self, depth: int) -> Sequence[Lease]:
        return self._news([*self._held, *self._leases[self._next : self._next + depth]])

    @property
    def version(self) -> int:
        return self._version

    def census(self, num_samples: int, batch_size: int) -> Census:
        return LocalCensus(num_samples, batch_size)

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]
