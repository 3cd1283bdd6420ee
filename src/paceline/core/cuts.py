"""The leases of one epoch, cut from its batches one batch at a time, when needed.

    taken                 cut, and not taken yet     not cut yet
    |--0--|--1--|--2--|   |--3--|                    ...            has_more: any of the last two

The end of a stream is found while it is read, when leases after it may already be cut: those not
taken are deleted, those taken stay, and the ledger knows which. This module must not know who holds
what.
"""

from bisect import bisect_left
from itertools import pairwise
from operator import attrgetter
from typing import Any

from ..events import Lease
from .batches import Batches


class Cuts:
    """The leases of one epoch, cut one batch at a time."""

    __slots__ = ("_epoch", "_first_id", "_next_batch", "_num_taken", "batches", "end", "leases")

    def __init__(self, batches: Batches, epoch: int, first_id: int) -> None:
        self.batches = batches
        self._epoch = epoch
        self._first_id = first_id
        # Before the first epoch there is nothing to cut.
        self._next_batch = 0 if epoch >= 0 else batches.num_batches
        self._num_taken = 0
        self.leases: list[Lease] = []  # so far, in cut order, which is position order
        self.end: int | None = None  # of a stream, once it is known

    @property
    def has_more(self) -> bool:
        """Whether a lease has not been taken yet."""
        return self._num_taken < len(self.leases) or self._next_batch < self.batches.num_batches

    @property
    def next_id(self) -> int:
        """The id of the next lease to be cut."""
        return self._first_id + len(self.leases)

    def take(self) -> Lease | None:
        """Take the next lease; None at the end of the epoch."""
        if self._num_taken == len(self.leases):
            if self._next_batch == self.batches.num_batches:
                return None
            self.leases += self.batches.cut(self._next_batch, self._epoch, self.next_id)
            self._next_batch += 1
        lease = self.leases[self._num_taken]
        self._num_taken += 1
        return lease

    def end_at(self, position: int) -> None:
        """End the stream before this position: no lease from there on is taken."""
        self.end = position = min(position, self.batches.end)
        index = bisect_left(self.leases, position, key=attrgetter("start"))
        del self.leases[max(index, self._num_taken) :]
        cut_until = self.leases[-1].stop if self.leases else 0
        self.batches = self.batches.with_ends(max(position, cut_until))
        self._next_batch = min(self._next_batch, self.batches.num_batches)

    def cut_off(self) -> None:
        """End after the last lease taken; the stream's end stays unknown."""
        del self.leases[self._num_taken :]
        self._next_batch = self.batches.num_batches

    def is_beyond(self, lease: Lease) -> bool:
        """Whether the lease is after the end of the stream, if that is known."""
        return self.end is not None and lease.start >= self.end

    def num_left(self, at_most: int) -> int:
        """How many leases can still be taken, counted up to ``at_most``."""
        num_left, batch = len(self.leases) - self._num_taken, self._next_batch
        while num_left < at_most and batch < self.batches.num_batches:
            start, end = self.batches.bounds(batch)
            num_left += min(self.batches.parts, end - start)
            batch += 1
        return min(num_left, at_most)

    def index(self, lease_id: int) -> int:
        """The index of this lease in `leases`."""
        return lease_id - self._first_id

    def by_id(self, lease_id: int) -> Lease:
        """The lease with this id."""
        return self.leases[lease_id - self._first_id]

    def begins_at(self, position: int) -> bool:
        """Whether a lease of the epoch begins at this position, or the epoch ends there."""
        batches = self.batches
        if position >= batches.end:
            return True
        leases = batches.cut(batches.batch_at(position), 0, 0)
        return any(lease.start == position for lease in leases)

    def first_id(self, position: int) -> int:
        """The id of the first lease from ``position`` on; 0: there is none."""
        index = bisect_left(self.leases, position, key=attrgetter("start"))
        if index < len(self.leases):
            return self.leases[index].id
        batches, cut_until = self.batches, self.leases[-1].stop if self.leases else 0
        num_before = batches.num_leases_before(position)
        if num_before == batches.num_leases:
            return 0
        return self.next_id + num_before - batches.num_leases_before(cut_until)

    def all(self) -> list[Lease]:
        """All leases of the epoch in cut order, future ones included; changes nothing."""
        cuts = list(self.leases)
        for batch in range(self._next_batch, self.batches.num_batches):
            cuts += self.batches.cut(batch, self._epoch, self._first_id + len(cuts))
        return cuts

    def state(self) -> dict[str, Any]:
        """The whole state, as JSON."""
        return {
            "batch_ends": self.batches.own_ends,
            "end": self.end,
            "parts": self.batches.parts,
            "epoch": self._epoch,
            "first_id": self._first_id,
            "next_batch": self._next_batch,
            "num_taken": self._num_taken,
            "stops": [lease.stop for lease in self.leases],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], batches: Batches) -> "Cuts":
        """Restore a `state()`; `batches` give the sizes."""
        ends = state["batch_ends"]
        cuts = cls(
            batches if ends is None else batches.with_ends(ends), state["epoch"], state["first_id"]
        )
        cuts._next_batch, cuts._num_taken = state["next_batch"], state["num_taken"]
        cuts.end = state.get("end")  # older runs have no streams
        for start, stop in pairwise([0, *state["stops"]]):
            cuts.leases.append(Lease(cuts.next_id, cuts._epoch, start, stop))
        return cuts
