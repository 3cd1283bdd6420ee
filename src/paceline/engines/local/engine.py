"""The local engine: members are processes on this machine, with memory that they share.

    launcher (coordinator) --channel (socket pair)--> member 0, 1, ...     switchboard.py
          \\--socket--> fork server --fork--> member 0, 1, ...              engine.py
    control page, arena: memfd, inherited by all

`LocalProcesses` starts, observes, ends and restarts members without knowing what they share or
send; the program is in unnamed memory. This module must not know protocols, plans or terminals.
"""

import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from ...store.control import INSIDE, Control, control_bytes
from ...store.memory import SharedMemory
from ...system.limits import Toll, allow
from ...system.vitals import Vitals, read_vitals
from ...wire.channel import socket_pair
from ...wire.messages import ToMember
from ..base import (
    Engine,
    Event,
    Happening,
    HelperWoken,
    MemberSpec,
    ProcessContinued,
    Processes,
    ProcessLeft,
    ProcessStarted,
    ProcessStopped,
    Signs,
    StoreView,
    Traits,
)
from . import client
from .stack import StackProbe
from .switchboard import Switchboard


class LocalProcesses(Processes):
    """The processes of one run.

    Args:
        signs: returns the signs of life of the member on a seat.
        begins: called with a member, its seat and its channel before it is forked.
        inherited: descriptors that every member inherits, after its own.
        exchange: ``module:function`` that makes the member's exchange.
    """

    def __init__(
        self,
        signs: Callable[[int], Signs],
        begins: Callable[[int, int, socket.socket], None],
        inherited: Sequence[int],
        exchange: str,
    ) -> None:
        self._signs, self._begins = signs, begins
        self._inherited, self._exchange = list(inherited), exchange
        self._toll = Toll(time.monotonic())
        self._given_up: set[int] = set()
        self._program = SharedMemory.create()
        self._specs: dict[int, MemberSpec] = {}
        """Seat -> the spec of its first member."""
        self._probes: dict[int, StackProbe] = {}
        self.seats: dict[int, int] = {}
        self._server = client.take()

    def may_import(self, names: Sequence[str]) -> None:
        """Allow members to start with these modules imported, but none that only an earlier run
        listed."""
        self._server = client.take_with(self._server, names)

    def start(self, specs: Sequence[MemberSpec], program: bytes) -> dict[int, tuple[int, int]]:
        """Fork these members; returns member -> (seat, pid)."""
        self._program.grow(len(program))
        self._program.buffer[:] = program
        self._server.await_message("ready")
        for spec in specs:
            self._specs[spec.seat] = replace(spec, exchange=self._exchange)
            self._fork(self._specs[spec.seat])
        for spec in specs:
            self._probes[spec.member].pid = int(self._server.await_message("started")["pid"])
        return {spec.member: (spec.seat, self._probes[spec.member].pid) for spec in specs}

    def fileno(self) -> int:
        """Return a descriptor that is readable when there may be events."""
        return self._server.fileno()

    def events(self, *, is_ready: bool) -> list[tuple[int, Happening]]:
        """Return what has happened to members, without waiting.

        Args:
            is_ready: whether the fork server's socket is readable.
        """
        self._toll.look(time.monotonic())
        events = [self._event_of(message) for message in self._server.early_messages()]
        if self._server.wake_if_stopped():
            events.append((-1, HelperWoken("the process that workers are forked from")))
        if is_ready and (message := self._server.next_message()) is not None:
            events.append(self._event_of(message))
        return events

    def _event_of(self, message: dict[str, int]) -> tuple[int, Happening]:
        """The fork server's message as an event."""
        if "started" in message:
            member, pid = message["started"], message["pid"]
            self._probes[member].pid = pid
            return member, ProcessStarted(self.seats[member], pid)
        if "stopped" in message:
            return message["stopped"], ProcessStopped()
        if "continued" in message:
            return message["continued"], ProcessContinued()
        member, code = message["ended"], message["code"]
        self._probes[member].close()
        reason = f"killed by signal {-code}" if code < 0 else f"exit {code}"
        if cause := message.get("unable"):
            reason = f"it could not be forked: {cause}"
        if -code == signal.SIGKILL and member not in self._given_up:
            reason += self._toll.explain(time.monotonic())
        return member, ProcessLeft(reason)

    def _fork(self, spec: MemberSpec) -> None:
        """Have the fork server fork this member."""
        coordinator_end, member_end = socket_pair()
        probe = self._probes[spec.member] = StackProbe()
        self.seats[spec.member] = spec.seat
        self._begins(spec.member, spec.seat, coordinator_end)
        descriptors = [member_end.fileno(), probe.fd, self._program.fd, *self._inherited]
        self._server.fork_member(asdict(spec), descriptors)
        member_end.close()

    # -- the contract ---------------------------------------------------------------------------

    def spawn(self, member: int, seat: int, changes: dict[str, object]) -> None:
        first = self._specs[seat]
        self._fork(replace(first, member=member, context={**first.context, **changes}))

    def end(self, member: int) -> None:
        self._given_up.add(member)
        self._server.kill(member)

    def signs(self, member: int) -> Signs:
        return self._signs(self.seats[member])

    def vitals(self, member: int) -> Vitals:
        return read_vitals(self._probes[member].pid)

    def whereabouts(self, member: int, does: str = "is") -> str:
        return self._probes[member].describe(does)

    def hurry(self, member: int) -> None:
        self._probes[member].hurry()

    def close(self) -> None:
        """End all members."""
        client.give_back(self._server)
        for probe in self._probes.values():
            probe.close()
        self._program.close()


_EXCHANGE = "paceline.engines.local.process:exchange_in_shared_memory"


class LocalEngine(Engine):
    """Runs members as processes on this machine, with shared memory between them.

    Args:
        num_seats: the number of workers.

    Raises:
        ConfigError: this machine, or the share of it that may be used, cannot hold that many.
    """

    traits = Traits(name="local", cancels=True, loses_members=True, has_store=True, is_spmd=True)
    processes: LocalProcesses

    def __init__(self, num_seats: int) -> None:
        allow(num_seats)
        self._page = SharedMemory.create(control_bytes(num_seats))
        self._arena = SharedMemory.create()
        self._control = Control(self._page, num_seats)
        shared = [self._page.fd, self._arena.fd]
        self.processes = LocalProcesses(self._signs, self._begins, shared, _EXCHANGE)
        self._switchboard = Switchboard(self.processes.fileno())
        self._is_closed = False

    def start(self, specs: Sequence[MemberSpec], program: bytes) -> dict[int, tuple[int, int]]:
        self.processes.may_import(specs[0].preload)
        self._switchboard.look_at(self.processes.fileno())
        return self.processes.start(specs, program)

    def events(self, timeout_s: float) -> Sequence[Event]:
        events: list[Event] = []
        messages, is_ready = self._switchboard.hear(timeout_s)
        events += messages
        for member, happening in self.processes.events(is_ready=is_ready):
            if isinstance(happening, ProcessLeft):
                self._control[self._control.gone[self.processes.seats[member]]] = 1
                events += self._switchboard.hang_up(member)
            events.append((member, happening))
        return events

    def send(self, messages: Sequence[tuple[int, ToMember]]) -> None:
        self._switchboard.send(messages)

    def cancel(self, member: int, serial: int) -> None:
        index = self._control.cancelled[self.processes.seats[member]]
        self._control.set_and_wake(index, serial + 1)

    def lay_out(self, num_bytes: int) -> StoreView:
        # Never shrink it: a process that still reads the last run's memory would be killed.
        self._arena.grow(max(num_bytes, self._arena.num_bytes))
        return StoreView(self._arena, self._control)

    def clear(self) -> None:
        seats = {self.processes.seats[member] for member in self._switchboard.members}
        self._control.clear(gone=set(range(self._control.num_seats)) - seats)
        self._arena.clear()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.processes.close()
            self._switchboard.close()
            self._page.close_descriptor()
            self._arena.close_descriptor()

    def _begins(self, member: int, seat: int, end: socket.socket) -> None:
        """Open a starting member's channel and clear its seat's control words."""
        self._switchboard.open(member, end)
        control = self._control
        for words in (control.cancelled, control.marks, control.gone):
            control[words[seat]] = 0

    def _signs(self, seat: int) -> Signs:
        control = self._control
        beats, arrived = control[control.beats[seat]], control[control.arrived[seat]]
        return Signs(beats, arrived, control[INSIDE] == seat + 1)
