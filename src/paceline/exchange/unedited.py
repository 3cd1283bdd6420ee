"""Whether anything but the run changed a member's weights, and what is done about it.

    pull -> mark -> the script computes -> check -> push        changed weights: refused by name
    end of an epoch -> the script may do anything -> check_all -> next epoch
    prepare -> the script loads -> first epoch                  accepted: the main member's count

What was changed and restored, as for an evaluation with averaged weights, is no change. If the
weights are in the store's own block there is no other copy to compare with, so checksums are kept
of an epoch's end. This module must not know messages, jobs or the loop.
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
"""Pushes that look for recreated parameters: a model that recreates them does so in each pass."""


class Unedited:
    """Checks the weights of one member.

    Args:
        hooks: check the script's other objects that must not change.
    """

    def __init__(self, replica: Replica, store: SharedStore, hooks: ScriptHooks) -> None:
        self._replica, self._store, self._hooks = replica, store, hooks
        self._parameters = replica.layout.parameters
        self._last_buffers: Tensor | None = None
        self._num_looks = _NUM_LOOKS
        self._digests: list[int] = []
        """Of the weights at an epoch's end, if they are in the store's own block."""

    def watch(self, memory: Tensor, ranges: Sequence[Range] | None = None) -> None:
        """From now on the weights are in ``memory``.

        Args:
            ranges: others may write outside of these; None: only this member writes here.
        """
        section = self._parameters
        self._memory = memory
        self._is_shared = ranges is not None
        self._marks = Marks(memory, [(section.start, section.stop)] if ranges is None else ranges)

    def mark(self, source: Tensor | None = None) -> None:
        """Take the weights as a version's; ``source``: memory with the same weights."""
        self._marks.set(source)
        self._versions = self._replica.held.versions()

    def stepped(self) -> None:
        """The user's optimizer stepped here, and may have replaced a weight's memory."""
        self._replica.held.take_parameters()
        self.mark()

    def check(self, version: int = -1) -> None:
        """Before a push: check that the weights are as they were marked.

        Args:
            version: of the weights, if the store has all of it; else -1.

        Raises:
            ConfigError: they changed, or are in other memory; the parameter is named.
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
            # It was written, but the sampled bytes are as before, so the rest must be compared.
            # What others compute on meanwhile must not be written at all.
            if now != then and (self._is_shared or not self._is_of(version)):
                raise edited(self._parameters.places[number].name)

    def glance(self) -> None:
        """Before waiting for others: check whether one of them changed the weights meanwhile.

        What it restores before all have arrived cannot be seen after that.

        Raises:
            ConfigError: one did; the parameter is named.
        """
        if (offset := self._marks.glance()) is not None:
            raise self._edited_at(offset)

    def _is_of(self, version: int) -> bool:
        """Check that every byte is this version's; return False if that cannot be checked."""
        block = self._store.standing(version)
        if block is None:
            return False
        section = self._parameters
        if self._memory.data_ptr() == block.data_ptr():  # they have no other copy
            now = digests(section, block)
            then = self._digests or now
            for place, old, new in zip(section.places, then, now, strict=True):
                if old != new:
                    raise edited(place.name)
            return True
        weights = section.of(self._memory).to(block.device)
        offset = first_difference(weights, section.of(block))
        if self._store.standing(version) is None:
            return False
        if offset is not None:
            raise self._edited_at(section.start + offset)
        return True

    def _edited_at(self, offset: int) -> Exception:
        """Return the error for a change at this byte."""
        places = self._parameters.places
        return edited(next(place.name for place in reversed(places) if place.offset <= offset))

    def take_published(self) -> None:
        """Accept what the script changed since the last mark.

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
        """Begin the time between epochs: the newest version was pulled.

        Raises:
            ConfigError: a parameter was recreated in the loop.
        """
        self._replica.held.check_made_anew()
        self._last_buffers = self._replica.layout.buffers.of(home).clone()
        block = self._store.blocks[self._store.current]
        is_only = self._memory.data_ptr() == block.data_ptr()
        self._digests = digests(self._parameters, block) if is_only else []

    def check_all(self, version: int) -> None:
        """Before an epoch: check that every weight is that of ``version``; raises as ``check``."""
        self._replica.held.take_buffers()
        self._replica.held.check_names()
        self.check(version)
        self._is_of(version)

    def take_all(self) -> None:
        """Before the first epoch: accept changed weights."""
        held = self._replica.held
        held.take_buffers()
        held.check_names()
        held.take_parameters()
        self._hooks.check_objects()

    def buffers_to_keep(self, home: Tensor) -> Tensor | None:
        """Return buffers that the script changed since the last epoch; None if it changed none."""
        buffers = self._replica.layout.buffers.of(home)
        if self._last_buffers is None or torch.equal(buffers, self._last_buffers):
            return None
        return buffers.clone()


def digests(section: Section, block: Tensor) -> list[int]:
    """Return a checksum of each tensor of the section in ``block``, which is on a CPU."""
    return [
        zlib.crc32(block[place.offset : place.offset + place.num_bytes].numpy().data)
        for place in section.places
    ]
