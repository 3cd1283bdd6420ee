"""A member's part in a checkpoint: it pins a whole version, and writes what only it knows.

    pin (one member): the block -> the pinned block, which the writer reads
    own (that member; under local-sgd every one): schedulers, random states, ... -> worker-K.json

A disk that is full is told to the coordinator and harms nothing else. This module must not know
what a member remembers, when a checkpoint is due, or who writes it.
"""

from torch import Tensor

from ..store.parameter_store import SharedStore
from ..wire.channel import Channel
from ..wire.messages import Copied
from .base import ScriptHooks


class Snapshot:
    """The snapshots of one member.

    Args:
        hooks: write what this member remembers, and what lies where in the pinned block.
    """

    def __init__(self, lane: Channel, hooks: ScriptHooks) -> None:
        self._lane, self._hooks = lane, hooks
        self.newest = 0
        """Number of the last one that this member took part in."""

    def begin(self, store: SharedStore) -> None:
        """The store is laid out."""
        self._store = store

    def take(self, number: int, version: int, block: Tensor, buffers: Tensor | None = None) -> None:
        """Pin ``block``, which holds ``version`` and is changed by nobody now, and say so."""
        self._store.pin(block, buffers)
        self._tell(number, version, is_pinned=True)

    def add_own(self, number: int, version: int) -> None:
        """Only what this member remembers: another one pins the version."""
        self._tell(number, version, is_pinned=False)

    def _tell(self, number: int, version: int, *, is_pinned: bool) -> None:
        fault = ""
        try:
            if self.newest < number:
                self.newest = number
                self._hooks.write_own(number)
            if is_pinned:
                self._hooks.write_layout(number)
        except OSError as error:
            fault = error.strerror or str(error)
        self._lane.send(Copied(number, version, is_pinned, fault))
