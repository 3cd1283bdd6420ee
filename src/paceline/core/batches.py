"""Cut an epoch into batches, one an update, and each batch into mini-batches, one a push.

    positions   0 . . . . . . . . 1 . . . . . . . . 2 . .
    batches     |------- 0 ------|------- 1 -------|- 2 -|      the last may be short, or left out
    mini-batches|-- 0 --|-- 1 ---|-- 2 --|--- 3 ---|4 | 5|      here two pushes make an update
    by columns  |-- 0 --|-- 1 ---|-- 2 --|--- 3 ---|- 4 -|      a short batch at the same places

A module of its own, so that the ledger, the plan and an exchange between peers cut alike. It must
not know who holds what.
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TypeAlias

from ..errors import ConfigError
from ..events import Lease

Ends: TypeAlias = Sequence[int] | int
"""The ends of one epoch's batches, if they differ from other epochs': all of them, or the end of
the last batch of the usual size."""


class Batches:
    """The batches of one epoch; immutable.

    Args:
        num_samples: positions an epoch has, >= 1.
        batch_size: samples an update averages, >= parts.
        parts: mini-batches a batch is cut into, one a push (the protocol's K).
        ends: where the batches of the user's own batch sampler end, instead of the two above.
        keep_remainder: whether a short last batch is used (torch: not drop_last).
        has_columns: part j has the same places in every batch, also in a short one.
    """

    __slots__ = (
        "_batch_size", "_counts", "_end", "_ends", "_full", "_own_end", "_parts", "has_columns",
        "num_batches",
    )  # fmt: skip

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        parts: int,
        *,
        ends: Sequence[int] | None = None,
        keep_remainder: bool = True,
        has_columns: bool = False,
    ) -> None:
        if parts < 1:
            raise ConfigError(f"an update needs at least 1 push, got {parts}")
        self._batch_size = batch_size
        self._parts = parts
        self.has_columns = has_columns
        self._own_end: int | None = None
        self._ends = None if ends is None else _checked(ends)
        self._end = num_samples if self._ends is None else self._ends[-1]
        if self._ends is None:
            self._end = self._checked_end(num_samples, keep_remainder)
        num_batches = -(-self._end // batch_size) if self._ends is None else len(self._ends)
        self.num_batches = num_batches  # of an epoch: the length of the loader
        sizes = [b - a for a, b in pairwise([0, *(self._ends or ())])]
        self._full = batch_size if not has_columns else max(sizes, default=batch_size)
        if has_columns:
            self._refuse_other_sizes(sizes)
        self._counts = list(accumulate(map(self._parts_for, sizes)))  # leases up to each batch

    def _checked_end(self, num_samples: int, keep_remainder: bool) -> int:
        if num_samples < 1:
            raise ConfigError(f"an epoch needs at least 1 sample, got {num_samples}")
        if self._batch_size < self._parts:
            raise ConfigError(
                f"batch size must be >= {self._parts}, the pushes of an update, "
                f"got {self._batch_size}; use a larger batch or fewer pushes an update"
            )
        end = num_samples if keep_remainder else num_samples - num_samples % self._batch_size
        if end == 0:
            raise ConfigError(
                f"{num_samples} samples do not fill one batch of {self._batch_size}, and the "
                f"remainder is left out; use a smaller batch or keep it (drop_last=False)"
            )
        return end

    def _refuse_other_sizes(self, sizes: list[int]) -> None:
        """Raise ConfigError if the columns of the batches differ."""
        other_sizes = [size for size in sizes[:-1] if size != self._full]
        if other_sizes or self._full < self._parts:
            raise ConfigError(
                f"sticky=True: a batch of {other_sizes[0] if other_sizes else self._full} samples "
                f"among those of {self._full} cannot be shared out so that each worker keeps its "
                f"part; make all batches but the last of one size, >= {self._parts}"
            )

    def with_ends(self, ends: Ends) -> "Batches":
        """These batches with other ends, or up to an end."""
        if not isinstance(ends, int):
            return Batches(
                self._end, self._batch_size, self._parts, ends=ends, has_columns=self.has_columns
            )
        batches = Batches(ends, self._batch_size, self._parts, has_columns=self.has_columns)
        batches._own_end = ends
        return batches

    @property
    def end(self) -> int:
        """Positions that an epoch uses, without a remainder that is left out."""
        return self._end

    @property
    def parts(self) -> int:
        """Mini-batches that a batch is cut into."""
        return self._parts

    @property
    def own_ends(self) -> list[int] | int | None:
        """The ends that were given, or None."""
        return self._own_end if self._ends is None else list(self._ends)

    def bounds(self, batch: int) -> tuple[int, int]:
        """The positions ``[start, stop)`` of a batch."""
        if self._ends is None:
            start = batch * self._batch_size
            return start, min(start + self._batch_size, self._end)
        return self._ends[batch - 1] if batch else 0, self._ends[batch]

    def batch_at(self, position: int) -> int:
        """The batch that has this position."""
        if self._ends is None:
            return position // self._batch_size
        return bisect_right(self._ends, position)

    def cut(self, batch: int, epoch: int, first_id: int) -> list[Lease]:
        """Cut a batch into `parts` non-empty ranges; in a full batch sizes differ by at most 1."""
        parts = self._parts_of(batch)
        return [self._lease(batch, part, epoch, first_id + part) for part in range(parts)]

    def _parts_of(self, batch: int) -> int:
        start, end = self.bounds(batch)
        return self._parts_for(end - start)

    def _parts_for(self, size: int) -> int:
        if not self.has_columns:
            return min(self._parts, size)
        return sum(self._full * part // self._parts < size for part in range(self._parts))

    def _lease(self, batch: int, part: int, epoch: int, lease_id: int) -> Lease:
        start, end = self.bounds(batch)
        size, parts = end - start, min(self._parts, end - start)
        full = size
        if self.has_columns:
            full, parts = self._full, self._parts
        first, stop = (min(size, full * border // parts) for border in (part, part + 1))
        return Lease(lease_id, epoch, start + first, start + stop)

    def part_at(self, position: int) -> int:
        """Which part of its batch begins at this position."""
        return [lease.start for lease in self.cut(self.batch_at(position), 0, 0)].index(position)

    @property
    def num_leases(self) -> int:
        """Mini-batches an epoch has."""
        if self._ends is not None:
            return self._counts[-1]
        return (self.num_batches - 1) * self._parts + self._parts_of(self.num_batches - 1)

    def lease(self, index: int, epoch: int, lease_id: int) -> Lease:
        """The mini-batch with this index in the epoch."""
        if self._ends is None:  # only the last batch is short
            return self._lease(*divmod(index, self._parts), epoch, lease_id)
        batch = bisect_right(self._counts, index)
        before = self._counts[batch - 1] if batch else 0
        return self._lease(batch, index - before, epoch, lease_id)

    def num_leases_before(self, position: int) -> int:
        """How many mini-batches begin before this position of the epoch."""
        if position >= self._end:
            return self.num_leases
        batch = self.batch_at(position)
        if self._ends is None:
            before = batch * self._parts
        else:
            before = self._counts[batch - 1] if batch else 0
        return before + sum(lease.start < position for lease in self.cut(batch, 0, 0))


def _checked(ends: Sequence[int]) -> tuple[int, ...]:
    if not ends or ends[0] < 1 or any(a >= b for a, b in pairwise(ends)):
        raise ConfigError(
            f"batches must have at least one sample each, got batches that end at {list(ends)[:8]}"
        )
    return tuple(ends)


class PeerLeases:
    """The leases of each member in the rounds of an epoch between peers, from a position on.

    Round j gives member r the leases [(j P + r) H, (j P + r + 1) H), with P members and H steps;
    the last round deals too few leases evenly; with columns member r has part r of the batches
    [j H, (j + 1) H). Short rounds, which have one step, may come first. The coordinator cuts the
    same when it releases in member order, so peers agree with it without asking
    (tests/core/test_coordinator.py). A lease is cut when it is needed, so that a long epoch costs
    no more than a short one.

    Args:
        num_steps: steps of each member in a round that is not short.
        num_short: rounds of one step, which come first.
        position: where the first lease begins; earlier ones are done.
        first_id: the id of that lease.
    """

    __slots__ = (
        "_batches", "_epoch", "_first", "_first_id", "_num_left", "_num_members", "_short", "_steps"
    )  # fmt: skip

    def __init__(
        self, batches: Batches, num_members: int, num_steps: int, num_short: int = 0, *,
        epoch: int, position: int = 0, first_id: int = 0,
    ) -> None:  # fmt: skip
        self._batches, self._epoch = batches, epoch
        self._num_members, self._steps = num_members, num_steps
        self._first, self._first_id = batches.num_leases_before(position), first_id
        self._num_left = batches.num_leases - self._first
        self._short = min(num_short, -(-self._num_left // num_members))

    @property
    def num_rounds(self) -> int:
        num_later = max(0, self._num_left - self._short * self._num_members)
        return self._short + -(-num_later // (self._num_members * self._steps))

    def _steps_of(self, number: int) -> tuple[int, int]:
        """Each member's steps before a round, and in it."""
        num_short = min(number, self._short)
        before = num_short + (number - num_short) * self._steps
        return before, 1 if number < self._short else self._steps

    @property
    def last_position(self) -> int:
        """Where the last round begins."""
        return self.begins_at(self.num_rounds - 1)

    def begins_at(self, number: int) -> int:
        """The position where a round with leases begins; those before are in earlier rounds."""
        before, _ = self._steps_of(number)
        index = self._first + before * self._num_members
        return self._batches.lease(index, self._epoch, 0).start

    def of(self, number: int, rank: int) -> list[Lease]:
        """The leases of a member in a round; empty if others take the last ones."""
        if self._batches.has_columns:
            return self._of_column(number, rank)
        before, steps = self._steps_of(number)
        start = before * self._num_members
        for place in range(rank + 1):
            share = even_share(self._num_left - start, self._num_members - place, steps)
            start += share
        return [
            self._batches.lease(self._first + i, self._epoch, self._first_id + i)
            for i in range(start - share, start)
        ]

    def _of_column(self, number: int, rank: int) -> list[Lease]:
        """The same if each member keeps its part: its part of H successive batches."""
        before, steps = self._steps_of(number)
        parts, first = self._num_members, self._first + before * self._num_members
        indices = range(first + rank, first + parts * steps, parts)
        return [
            self._batches.lease(index, self._epoch, self._first_id + index - self._first)
            for index in indices
            if index < self._batches.num_leases
        ]


def share(own: tuple[int, int], whole: tuple[int, int], position: int) -> Fraction:
    """Map a position of ``whole`` linearly into ``own``; both are ``[start, stop)``."""
    (first, last), (start, stop) = own, whole
    return first + Fraction((last - first) * (position - start), stop - start)


def even_share(num_left: int, num_members: int, num_steps: int) -> int:
    """Leases for the next member: its steps, or its even share of those that are left."""
    return min(num_steps, -(-num_left // num_members))
