"""The local engine: members are processes on this machine, with memory that they share.

    launcher (coordinator) --channel (socket pair)--> member 0, 1, ...     switchboard.py
          \\--socket--> fork server --fork--> member 0, 1, ...              processes.py
    control page, arena: memfd, inherited by all

This module must not know protocols, plans or terminals.
"""

import socket
from collections.abc import Sequence

from ...store.control import INSIDE, Control, control_bytes
from ...store.memory import SharedMemory
from ...system.limits import allow
from ...wire.messages import ToMember
from ..base import Engine, Event, MemberSpec, ProcessLeft, Signs, StoreView, Traits
from .processes import LocalProcesses
from .switchboard import Switchboard

_EXCHANGE = "paceline.engines.local.process:exchange_in_shared_memory"


class LocalEngine(Engine):
    """Processes on this machine, shared memory between them.

    Args:
        num_seats: workers.

    Raises:
        ConfigError: this machine, or what of it may be used, has no room for so many.
    """

    traits = Traits(name="local", cancels=True, loses_members=True, has_store=True, is_spmd=True)
    processes: LocalProcesses

    def __init__(self, num_seats: int) -> None:
        allow(num_seats)
        page, self._arena = SharedMemory.create(control_bytes(num_seats)), SharedMemory.create()
        self._control = Control(page, num_seats)
        shared = [page.fd, self._arena.fd]
        self.processes = LocalProcesses(self._signs, self._begins, shared, _EXCHANGE)
        self._board = Switchboard(self.processes.fileno())
        self._is_closed = False

    def start(self, births: Sequence[MemberSpec], program: bytes) -> dict[int, tuple[int, int]]:
        return self.processes.start(births, program)

    def events(self, timeout_s: float) -> Sequence[Event]:
        events: list[Event] = []
        said, is_ready = self._board.hear(timeout_s)
        events += said
        for member, happening in self.processes.events(is_ready=is_ready):
            if isinstance(happening, ProcessLeft):
                self._control[self._control.gone[self.processes.seats[member]]] = 1
                events += self._board.drain(member)
            events.append((member, happening))
        return events

    def send(self, messages: Sequence[tuple[int, ToMember]]) -> None:
        self._board.send(messages)

    def cancel(self, member: int, serial: int) -> None:
        index = self._control.cancelled[self.processes.seats[member]]
        self._control.set_and_wake(index, serial + 1)

    def lay_out(self, num_bytes: int) -> StoreView:
        self._arena.grow(num_bytes)
        return StoreView(self._arena, self._control)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.processes.close()
            self._board.close()

    def _begins(self, member: int, seat: int, end: socket.socket) -> None:
        """A member is about to begin: what the last life on its seat has left is no sign of it."""
        self._board.open(member, end)
        control = self._control
        for words in (control.cancelled, control.marks, control.gone):
            control[words[seat]] = 0

    def _signs(self, seat: int) -> Signs:
        control = self._control
        beats, arrived = control[control.beats[seat]], control[control.arrived[seat]]
        return Signs(beats, arrived, control[INSIDE] == seat + 1)
