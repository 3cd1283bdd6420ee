"""The parameters of a run in memory that its members share: push, pull, versions, updates.

    block A, block B    parameters, buffers, optimizer state; one holds the newest version
    accumulator         the sum of the gradients of the current update; 16-bit ones: sums.py
    slot of each seat   the gradients and buffers of its last push
    pinned block        a whole version that stays unchanged while a checkpoint of it is written

An update reads version v and writes version v + 1 into the other block, so readers of v are never
disturbed, and if its executor dies half-way another member repeats it. Pushes are summed as they
arrive, so 100 members cost no more than two (beyond their own slots). Jobs (add, finish) are
numbered by the coordinator and done in that order by the members. A bit above 300 lines, since
readers and writers of the blocks are read together. This module must not know protocols, members
or leases.
"""

import cmath
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .clip import UNCLIPPED, Clip
from .control import GENERATION, JOBS, NORM, PASS, PUSH_SCALE, VERSION, Control
from .layout import ALIGN_BYTES, Layout
from .optimizer import Groups, Updater
from .sums import Sums, wide, wide_bytes
from .versions import NO_OVERFLOW, Applied, LossScale, LossScales, Norms

T = TypeVar("T")

NONE = "?"
"""Stands for no parameter's name."""


class SharedStore:
    """One run's parameters, as every member sees them.

    Args:
        layout: the same in all members.
        arena: ``(arena_bytes(layout, num_seats),)`` uint8, shared and zeroed at first.
        control: the run's words.
        has_peers: whether other processes read the store and may take a job over; if not, nothing
            is saved for them and nobody is woken.
    """

    def __init__(
        self, layout: Layout, arena: Tensor, control: Control, *, has_peers: bool = True
    ) -> None:
        self.layout = layout
        self._has_peers = has_peers
        self.control = control
        size = _aligned(layout.block_bytes)
        slot_size = _aligned(layout.slot_bytes + len(layout.parameters.places))
        self.blocks = (arena[: layout.block_bytes], arena[size : size + layout.block_bytes])
        starts = [2 * size + i * slot_size for i in range(control.num_seats + 1)]
        self._slots = [arena[start : start + slot_size] for start in starts]
        first = starts[-1] + slot_size
        wide_part = arena[first : first + wide_bytes(layout)]
        self._sums = Sums(layout, self._slots, wide_part, self.blocks, control, is_mended=has_peers)
        pinned = pinned_at(layout, control.num_seats)
        self._pinned = arena[pinned : pinned + layout.block_bytes]
        count = len(layout.parameters.places)
        self._present = [
            _as_bytes(slot[layout.slot_bytes : layout.slot_bytes + count]) for slot in self._slots
        ]
        self._buffers = layout.buffers
        self.applied = Applied(control)
        self.scales = LossScales(control)
        self.norms = Norms(control)
        self.scale: LossScale | None = None
        """The loss scale of the last version pulled; None: no member scales."""

    # -- push and pull --------------------------------------------------------------------------

    @property
    def sum_slot(self) -> Tensor:
        """Where gradients are summed or averaged."""
        return self._slots[0]

    def slot(self, seat: int) -> Tensor:
        """Gradients and buffers of this seat's next push, at the layout's offsets."""
        return self._slots[seat + 1]

    def present(self, seat: int) -> memoryview:
        """Per parameter: 1 if this seat's push has a gradient."""
        return self._present[seat + 1]

    @property
    def version(self) -> int:
        return self.control.version

    @property
    def current(self) -> int:
        """Number of the block that holds the newest version."""
        return self.control[VERSION] & 1

    def is_finite(self, seat: int) -> bool:
        """Whether no gradient of this seat's push is inf or nan, by one sum over each range."""
        runs = self._sums.gradients(seat + 1)
        is_finite = all(cmath.isfinite(run.sum().item()) for run in runs)
        return is_finite or self.not_finite(seat) == NONE  # absent gradients may have old values

    def not_finite(self, seat: int) -> str:
        """The name of the first parameter of this seat's push with an inf or nan gradient.

        NONE: all are finite.
        """
        for place, is_present in zip(
            self.layout.parameters.places, self.present(seat), strict=True
        ):
            if is_present and not bool(torch.isfinite(place.flat(self.slot(seat))).all()):
                return place.name
        return NONE

    def pull(self, version: int, out: Tensor) -> int:
        """Copy parameters and buffers of the newest version into ``out``; at least ``version``.

        Returns the version that was copied: one whole version, never half of two. The caller
        must have waited for ``version``.
        """
        control = self.control
        size = self.layout.slot_bytes
        while True:
            newest = control[VERSION]
            assert newest >> 1 >= version
            generation = GENERATION[newest & 1]
            before = control[generation]
            # Two updates may have been made between these reads: the block has a newer one then.
            if before & 1 or control[VERSION] != newest:
                continue
            out.copy_(self.blocks[newest & 1][:size])
            self.scale = self.scales.of(newest >> 1)
            if control[generation] == before:
                return newest >> 1

    def read_whole(self, read: Callable[[int], T]) -> T:
        """Call ``read`` on the block of the newest version; returns its result for a whole version.

        Args:
            read: called with the number of the block, again if that was changed meanwhile.
        """
        control = self.control
        while True:
            newest = control[VERSION]
            generation = GENERATION[newest & 1]
            before = control[generation]
            if before & 1 or control[VERSION] != newest:
                continue
            result = read(newest & 1)
            if control[generation] == before:
                return result

    def standing(self, version: int) -> Tensor | None:
        """The block of ``version``; None if that is not the newest version.

        Call it again after reading: the block may have been changed meanwhile.
        """
        newest = self.control[VERSION]
        is_whole = newest >> 1 == version and not self.control[GENERATION[newest & 1]] & 1
        return self.blocks[newest & 1] if is_whole else None

    def pin(self, block: Tensor, buffers: Tensor | None = None) -> None:
        """Copy a whole version to the pinned block, for a checkpoint; it must not change meanwhile.

        Args:
            block: with parameters and optimizer state.
            buffers: the model's, if the block has none while peers run.
        """
        self._pinned.copy_(block)
        if buffers is not None:
            self.layout.buffers.of(self._pinned).copy_(buffers)

    def replace(self, home: Tensor) -> None:
        """Replace the parameters of the newest version, while no update is made.

        With several members they are written to the other block first, as in an update: a death
        half-way changes nothing.

        Args:
            home: the parameters, at the layout's offsets, on any device.
        """
        parameters, old = self.layout.parameters, self.current
        if not self._has_peers or self.control.num_seats == 1:
            parameters.of(self.blocks[old]).copy_(parameters.of(home))
            return
        new = 1 - old
        self._begin_writing()
        self.blocks[new].copy_(self.blocks[old])
        parameters.of(self.blocks[new]).copy_(parameters.of(home))
        self._let_stand(self.version, new)

    # -- jobs -----------------------------------------------------------------------------------

    def add(self, job: int, seat: int, weight: float, is_first: bool, scale: float = 1.0) -> None:
        """Add ``weight`` times this seat's slot to the sum; ``is_first`` begins a new one.

        Args:
            scale: additional factor of gradients, for the push's staleness.
        """
        present, pushed = self._present[0], self._present[seat + 1]
        if is_first:
            self._begin_writing()
        self._sums.add(2 * job, seat + 1, (weight * scale, weight), is_first=is_first)
        for i in range(len(pushed)):
            present[i] = pushed[i] if is_first else present[i] | pushed[i]
        self.finished(job)

    def finish(
        self,
        job: int,
        updater: Sequence[Updater],
        groups: Groups,
        *,
        seat: int,
        scale: float,
        clip: Clip = UNCLIPPED,
        factors: Sequence[float] = (),
    ) -> None:
        """Write the next version: from the accumulator times ``scale``, or from one seat's slot.

        Eight arguments: an update needs them all, and all are plain numbers or the user's.

        Args:
            updater: one for each block.
            seat: the seat whose slot is the whole gradient, or -1 for the accumulator.
            scale: makes a mean of the accumulator; of a seat's slot, the factor of the gradient by
                its staleness (its buffers are not scaled).
            clip: how the averaged gradient is clipped.
            factors: additional factors of each optimizer's gradients, if several; none: all 1.
        """
        old, new = self.current, 1 - self.current
        self._begin_writing()
        factor = self._clip_factor(job, seat, scale, clip) if clip.has_norm else 1.0
        number, present = seat + 1, self._present[seat + 1]
        is_changed = scale != 1.0 or factor != 1.0 or clip.has_value
        if is_changed or (seat < 0 and self._sums.are_wide):
            both = scale * factor, scale if seat < 0 else 1.0
            self._sums.scale(2 * job + 1, number, both, clip)
            number = 0
        slot = self._slots[number]
        self.blocks[new].copy_(self.blocks[old])
        updater[new].step(slot, present, groups, factors)
        buffers = self._buffers
        if buffers.num_bytes:
            buffers.of(self.blocks[new]).copy_(buffers.of(slot))
        self._publish(is_update=True)
        self.finished(job)

    def skip(self, job: int, overflow_version: int = NO_OVERFLOW) -> None:
        """Write the next version without a change: a gradient was not finite.

        Args:
            overflow_version: the newest version from which a push overflowed its loss scale.
        """
        self._begin_writing()
        self.blocks[1 - self.current].copy_(self.blocks[self.current])
        self._publish(is_update=False, overflow_version=overflow_version)
        self.finished(job)

    def scale_once(self, number: int, measure: Callable[[], float]) -> float:
        """The scale of a push in pass ``number``; a member that takes it over gets the same."""
        if self.control[PASS] != number:
            self.control.set_double(PUSH_SCALE, measure())
        return self.control.double(PUSH_SCALE)

    def _clip_factor(self, job: int, seat: int, scale: float, clip: Clip) -> float:
        """The factor that clips the gradient of the update by its norm, which is noted.

        A member that takes a half-scaled update over uses the norm that was noted before.
        """
        if self.control[PASS] != 2 * job + 1:
            runs = self._sums.gradients(seat + 1)
            norms = [float(torch.linalg.vector_norm(run, dtype=wide(run))) for run in runs]
            self.control.set_double(NORM, scale * math.hypot(*norms))
        norm = self.control.double(NORM)
        self.norms.note(self.version + 1, norm)
        return clip.factor(norm)

    def _begin_writing(self) -> None:
        """Mark the other block as invalid: it gets undo copies, then the next version."""
        self.control[GENERATION[1 - self.current]] |= 1

    def _publish(self, *, is_update: bool, overflow_version: int = NO_OVERFLOW) -> None:
        version, new = self.version + 1, 1 - self.current
        self.bring(version, is_update=is_update, overflow_version=overflow_version)
        self._let_stand(version, new)

    def _let_stand(self, version: int, block: int) -> None:
        self.control[GENERATION[block]] += 1
        self._tell(VERSION, 2 * version + block)

    def bring(self, version: int, *, is_update: bool, overflow_version: int) -> LossScale | None:
        """Write counts and loss scale of ``version`` before it is published; returns the scale."""
        self.applied.bring(version, is_update=is_update)
        return self.scales.bring(version, is_update=is_update, overflow_version=overflow_version)

    def finished(self, job: int) -> None:
        """Note that this job is done."""
        self._tell(JOBS, job)

    def _tell(self, index: int, value: int) -> None:
        if self._has_peers:
            self.control.set_and_wake(index, value)
        else:
            self.control[index] = value


def arena_bytes(layout: Layout, num_seats: int, *, pins: bool = False) -> int:
    """Memory of the store: two blocks, the sums, a slot per seat; ``pins``: one more block."""
    return pinned_at(layout, num_seats) + (layout.block_bytes if pins else 0)


def pinned_at(layout: Layout, num_seats: int) -> int:
    """Where the pinned block begins, in bytes."""
    slot = _aligned(layout.slot_bytes + len(layout.parameters.places))
    return 2 * _aligned(layout.block_bytes) + (num_seats + 1) * slot + wide_bytes(layout)


def _as_bytes(block: Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
