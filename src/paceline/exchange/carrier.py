"""What carries a member's bytes and words: the one part of an exchange that an engine chooses.

    control      words that members see of each other: versions, jobs, barriers, who is called off
    open_store   the parameters and the slots, when it is known how large they are

Here they are memory that members share. Another carrier keeps both in each member and sends what
one of them writes to all; the exchange does not see the difference. This module must not know
messages or the loop.
"""

from typing import Protocol

from ..store.control import Control
from ..store.layout import Layout
from ..store.memory import Memory
from ..store.parameter_store import SharedStore


class Carrier(Protocol):
    """One member's access to what it has in common with the others."""

    control: Control

    def open_store(self, layout: Layout, num_bytes: int) -> SharedStore:
        """The store, as this member sees it.

        Args:
            num_bytes: that it takes in all, as the coordinator has said.
        """


class MemoryCarrier:
    """Memory that all members see: of this machine, or of one process.

    Args:
        arena: the store's; the engine gives it its size when the layout is known.
    """

    def __init__(self, control: Control, arena: Memory) -> None:
        self.control = control
        self._arena = arena

    def open_store(self, layout: Layout, num_bytes: int) -> SharedStore:
        return SharedStore(layout, self._arena.tensor(), self.control)
