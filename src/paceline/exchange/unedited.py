"""Whether anybody but the run has changed a member's weights, and what is done about it.

    pull -> mark -> the script computes -> check -> push        other weights: refused by name
    end of an epoch -> the script does as it likes -> check_all -> next epoch
    prepare -> the script loads -> first epoch                  carried: the main member's count

What was changed and put back, as for an evaluation with averaged weights, is no change. Where the
weights lie in the store's own block there is no other copy that they could be compared with: of an
epoch's end checksums stay. This module must not know messages, jobs or the loop.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..replica.held import Marks, Range, edited, first_difference
from ..replica.replica import Replica
from ..store.layout import Section
from ..store.parameter_store import SharedStore
from .base import ScriptHooks

_NUM_LOOKS = 2
"""Pushes of a run that look for parameters made anew: a model that does so does it in each pass."""


class Unedited:
    """Of one member.

    Args:
        hooks: look at what else of the script's objects must stay as it was.
    """

    def __init__(self, replica: Replica, store: SharedStore, hooks: ScriptHooks) -> None:
        self._replica, self._store, self._hooks = replica, store, hooks
        self._parameters = replica.layout.parameters
        self._last_buffers: Tensor | None = None
        self._num_looks = _NUM_LOOKS
        self._digests: list[int] = []
        """Of the weights at an epoch's end, where they lie in the store's own block."""

    def watch(self, memory: Tensor, ranges: Sequence[Range] | None = None) -> None:
        """From now on the weights lie in ``memory``.

        Args:
            ranges: others may write what lies outside; None: nobody but this member writes here.
        """
        section = self._parameters
        self._memory = memory
        self._is_shared = ranges is not None
        self._marks = Marks(memory, [(section.start, section.stop)] if ranges is None else ranges)

    def mark(self, source: Tensor | None = None) -> None:
        """The weights are those of a version now; ``source``: what they are, at the same place."""
        self._marks.set(source)
        self._versions = self._replica.held.versions()

    def stepped(self) -> None:
        """The user's optimizer has stepped here, and may have put other memory under a weight."""
        self._replica.held.take_parameters()
        self.mark()

    def check(self, version: int = -1) -> None:
        """Before a push: the weights are what they were when they were marked.

        Args:
            version: that they are of, where the store has all of it.

        Raises:
            ConfigError: they are not, or they lie elsewhere; the parameter is named.
        """
        if self._num_looks:
            self._num_looks -= 1
            self._replica.held.check_made_anew()
        self._hooks.check_objects()
        self._replica.held.check_parameters()
        if (offset := self._marks.changed()) is not None:
            raise self._edited_at(offset)
        versions = self._replica.held.versions()
        if versions == self._versions or (self._marks.is_whole and not self._is_shared):
            return
        for number, (now, then) in enumerate(zip(versions, self._versions, strict=True)):
            # Written, and where it was looked at all is as before: the rest must be compared. What
            # others compute on meanwhile must not be written at all.
            if now != then and (self._is_shared or not self._is_of(version)):
                raise edited(self._parameters.places[number].name)

    def glance(self) -> None:
        """Before others are waited for: whether one of them has put other weights there meanwhile.

        What it puts back before all have come is not seen any more when they have.

        Raises:
            ConfigError: it has; the parameter is named.
        """
        if (offset := self._marks.glance()) is not None:
            raise self._edited_at(offset)

    def _is_of(self, version: int) -> bool:
        """Whether the weights are those of this version in every byte; False: nobody can say."""
        block = self._store.standing(version)
        if block is None:
            return False
        section = self._parameters
        if self._memory.data_ptr() == block.data_ptr():  # they have no other copy
            now = digests(section, block)
            then = self._digests or now
            for place, one, other in zip(section.places, then, now, strict=True):
                if one != other:
                    raise edited(place.name)
            return True
        mine = section.of(self._memory).to(block.device)
        offset = first_difference(mine, section.of(block))
        if self._store.standing(version) is None:
            return False
        if offset is not None:
            raise self._edited_at(section.start + offset)
        return True

    def _edited_at(self, offset: int) -> Exception:
        """The error for a change at this byte."""
        places = self._parameters.places
        return edited(next(one.name for one in reversed(places) if one.offset <= offset))

    def take_published(self) -> None:
        """What the script has changed since the last mark is meant, and stands.

        Raises:
            ConfigError: a parameter came or went, or has another type, shape or device.
        """
        held = self._replica.held
        held.take_buffers()
        held.check_names()
        held.take_parameters()
        self._hooks.check_objects()
        self.mark()

    # -- between epochs -------------------------------------------------------------------------

    def end_epoch(self, home: Tensor) -> None:
        """The newest version was pulled: what the script does now is between epochs.

        Raises:
            ConfigError: a parameter was made anew in the loop.
        """
        self._replica.held.check_made_anew()
        self._last_buffers = self._replica.layout.buffers.of(home).clone()
        block = self._store.blocks[self._store.current]
        is_only = self._memory.data_ptr() == block.data_ptr()
        self._digests = digests(self._parameters, block) if is_only else []

    def check_all(self, version: int) -> None:
        """Before an epoch: every weight is that of ``version``. Raises: see ``check``."""
        self._replica.held.take_buffers()
        self._replica.held.check_names()
        self.check(version)
        self._is_of(version)

    def take_all(self) -> None:
        """Before the first epoch: weights may be others by now."""
        held = self._replica.held
        held.take_buffers()
        held.check_names()
        held.take_parameters()
        self._hooks.check_objects()

    def buffers_to_keep(self, home: Tensor) -> Tensor | None:
        """Buffers that the script has changed since the last epoch, as passes in it would."""
        buffers = self._replica.layout.buffers.of(home)
        if self._last_buffers is None or torch.equal(buffers, self._last_buffers):
            return None
        return buffers.clone()


def digests(section: Section, block: Tensor) -> list[int]:
    """A checksum of each tensor of the section in ``block``, which lies on a CPU."""
    return [
        zlib.crc32(block[one.offset : one.offset + one.num_bytes].numpy().data)
        for one in section.places
    ]
