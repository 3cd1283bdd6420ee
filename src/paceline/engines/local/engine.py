"""The local engine: members are processes on this machine.

    launcher (coordinator) --lane (socket pair)--> member 0, 1, ...
          \\--socket--> fork server --fork--> member 0, 1, ...
    control page, arena, program: memfd, inherited by all

This module must not know protocols, plans or terminals.
"""

import contextlib
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from ...core.jobs import Jobs, Payload
from ...events import Cancel, Fact, Grant, Joined, Late, Left, Order
from ...protocols.staleness import StalenessRule
from ...store.control import ALARM, BEGAN, INSIDE, JOBS, SNAPSHOT, Control, control_bytes
from ...store.memory import Memory, SharedMemory
from ...system.limits import Toll, allow
from ...system.vitals import Vitals, read_vitals
from ...wire.channel import SocketChannel, coordinator_channel, socket_pair
from ...wire.messages import FromMember, Resume, ToMember
from ..base import (
    Engine,
    Event,
    HelperWoken,
    MemberSpec,
    ProcessBorn,
    ProcessContinued,
    ProcessLeft,
    ProcessStopped,
    Signs,
    Traits,
)
from . import client
from .stack import StackProbe

_EVER = 2**63 - 1


class LocalEngine(Engine):
    """Processes on this machine, shared memory between them.

    Args:
        num_seats: workers.

    Raises:
        ConfigError: this machine, or what of it may be used, has no room for so many.
    """

    traits = Traits(name="local", cancels=True, loses_members=True, has_store=True, is_spmd=True)

    def __init__(self, num_seats: int) -> None:
        allow(num_seats)
        self._num_seats = num_seats
        self._toll = Toll()
        self._page = SharedMemory.create(control_bytes(num_seats))
        self._arena = SharedMemory.create()
        self._program = SharedMemory.create()
        self.control = Control(self._page, num_seats)
        self._seats: dict[int, int] = {}
        self._ends: dict[int, socket.socket] = {}
        self._by_descriptor: dict[int, int] = {}
        self._lanes: dict[int, SocketChannel[ToMember, FromMember]] = {}
        self._outbox: dict[int, list[ToMember]] = {}
        self._slow: set[int] = set()
        """Members that have not taken yet what they were sent."""
        self._serials: dict[int, int] = {}
        self._poll = select.poll()
        self._is_closed = False
        self._jobs: Jobs | None = None
        self._births: dict[int, MemberSpec] = {}
        """By seat: what its first member was told."""
        self._standings: dict[int, StackProbe] = {}
        self._cradle = client.take()
        self._poll.register(self._cradle, select.POLLIN)

    # -- members --------------------------------------------------------------------------------

    def start(self, births: Sequence[MemberSpec], program: bytes) -> dict[int, tuple[int, int]]:
        """Fork these members; member -> (seat, pid)."""
        self._program.grow(len(program))
        self._program.buffer[:] = program
        self._cradle.await_word("ready")
        for birth in births:
            self._births[birth.seat] = birth
            self._ask_for(birth)
        born = {}
        for birth in births:
            pid = int(self._cradle.await_word("born")["pid"])
            self._standings[birth.member].pid = pid
            born[birth.member] = (birth.seat, pid)
        return born

    def _ask_for(self, birth: MemberSpec) -> None:
        """Let the fork server fork this member."""
        ours, theirs = socket_pair()
        standing = self._standings[birth.member] = StackProbe()
        shared = [self._page.fd, self._arena.fd, standing.fd, self._program.fd]
        self._cradle.ask_for(asdict(birth), [theirs.fileno(), *shared])
        theirs.close()
        self._seats[birth.member] = birth.seat
        self._ends[birth.member] = ours
        self._lanes[birth.member] = coordinator_channel(ours)
        self._by_descriptor[ours.fileno()] = birth.member
        self._poll.register(ours, select.POLLIN)

    def spawn(self, member: int, seat: int, told: dict[str, object]) -> None:
        control, first = self.control, self._births[seat]
        control[control.cancelled[seat]] = 0
        control[control.marks[seat]] = 0
        control[control.gone[seat]] = 0
        context = {**first.context, **told}
        self._ask_for(replace(first, member=member, context=context))

    def is_free(self, seat: int) -> bool:
        return self._jobs is None or not self._jobs.needs(seat)

    def end(self, member: int) -> None:
        self._cradle.kill(member)

    def signs(self, member: int) -> Signs:
        control, seat = self.control, self._seats[member]
        has_job = self._jobs is not None and self._jobs.is_held_by(member)
        beats, arrived = control[control.beats[seat]], control[control.arrived[seat]]
        return Signs(beats, arrived, control.version, has_job, control[INSIDE] == seat + 1)

    def vitals(self, member: int) -> Vitals:
        return read_vitals(self._standings[member].pid)

    def whereabouts(self, member: int, does: str = "is") -> str:
        return self._standings[member].describe(does)

    def hurry(self, member: int) -> None:
        self._standings[member].hurry()

    def begun(self) -> None:
        self.control.set_double(BEGAN, time.perf_counter())

    # -- the contract ---------------------------------------------------------------------------

    def events(self, timeout_s: float) -> Sequence[Event]:
        if self._slow:
            self._send_rest()
        events: list[Event] = []
        told = [self._told(message) for message in self._cradle.early_words()]
        if self._cradle.woke_it():
            events.append((-1, HelperWoken("the process that workers are forked from")))
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            member = self._by_descriptor.get(descriptor)
            if member is None:
                word = self._cradle.next_word()
                told += [] if word is None else [self._told(word)]
                continue
            try:
                events += [(member, message) for message in self._lanes[member].receive(False)]
            except OSError:
                self._poll.unregister(descriptor)
        for member, message in told:
            if isinstance(message, ProcessLeft):
                self.control[self.control.gone[self._seats[member]]] = 1
                events += self._drain(member)
                if self._jobs is None:  # it never began: it is nobody's heir
                    del self._seats[member]
            elif isinstance(message, ProcessBorn):
                self._standings[member].pid = message.pid
            events.append((member, message))
        return events

    def _told(self, message: dict[str, int]) -> Event:
        """The fork server's word as an event."""
        if "born" in message:
            member = message["born"]
            return member, ProcessBorn(self._seats[member], message["pid"])
        if "stopped" in message:
            return message["stopped"], ProcessStopped()
        if "continued" in message:
            return message["continued"], ProcessContinued()
        code = message["code"]
        reason = f"killed by signal {-code}" if code < 0 else f"exit {code}"
        if -code == signal.SIGKILL:
            reason += self._toll.explain()
        return message["ended"], ProcessLeft(reason, code)

    def _drain(self, member: int) -> list[Event]:
        """What a member had sent before it ended."""
        events: list[Event] = []
        try:
            while messages := self._lanes[member].receive(False):
                events += [(member, message) for message in messages]
        except OSError:
            return events
        return events

    def prepare_jobs(self, samples_per_update: int, staleness: StalenessRule) -> None:
        self._jobs = Jobs(
            self._post, self._seats, lambda: self.control[JOBS], samples_per_update, staleness
        )

    def carry_out(
        self, orders: Sequence[Order], cause: Fact | None, payload: Payload | None
    ) -> None:
        jobs = self._jobs
        assert jobs is not None
        if isinstance(cause, Left):
            jobs.left(cause.member)
        elif isinstance(cause, Joined):
            jobs.joined(cause.member)
        jobs.settle(orders, cause, payload)
        cancelled = []
        for order in orders:
            kind = type(order)
            if kind is Grant:
                ticket = order.ticket  # type: ignore[union-attr]
                self._serials[ticket.member] = ticket.serial
                self._post(ticket.member, order)  # type: ignore[arg-type]
            elif kind is Cancel:
                cancelled.append(self._cancelled(order.member))  # type: ignore[union-attr]
            elif kind is Late:
                jobs.idle(order.ticket.member)  # type: ignore[union-attr]
        self._flush()
        # Last, so that who is woken finds its next grant already there and sleeps no second time.
        for index, serial in cancelled:
            self.control.set_and_wake(index, serial)

    def _cancelled(self, member: int) -> tuple[int, int]:
        """Which word tells a member that its work is called off, and its value."""
        return self.control.cancelled[self._seats[member]], self._serials[member] + 1

    def tell(self, member: int, message: ToMember) -> None:
        if isinstance(message, Resume):  # of a grant that peers knew of by themselves
            self._serials[member] = message.serial
        self._post(member, message)
        self._flush()

    def lay_out(self, num_bytes: int) -> None:
        self._arena.grow(num_bytes)

    def jump(self, version: int) -> None:
        assert self._jobs is not None
        self._jobs.jump(version)

    @property
    def memory(self) -> Memory:
        return self._arena

    def ask_copy(self, number: int) -> None:
        self.control[SNAPSHOT] = number
        assert self._jobs is not None
        self._jobs.ask_copy(number)

    def alarm(self) -> None:
        self.control[ALARM] = 1
        for index in self.control.arrived:
            self.control.wake(index)

    def calm(self) -> int:
        self.control[ALARM] = 0
        return max(self.control[index] for index in self.control.arrived)

    def stop(self, members: Sequence[int]) -> None:
        if self._jobs is not None:
            self._jobs.forget()
        for member in members:
            self.control.set_and_wake(self.control.cancelled[self._seats[member]], _EVER)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        client.give_back(self._cradle)
        for end in self._ends.values():
            end.close()
        for standing in self._standings.values():
            standing.close()
        self._program.close()

    # -- messages -------------------------------------------------------------------------------

    def _post(self, member: int, message: ToMember) -> None:
        self._outbox.setdefault(member, []).append(message)

    def _flush(self) -> None:
        for member, messages in self._outbox.items():
            try:
                self._lanes[member].send_all(messages)
            except OSError:
                continue  # it is gone; the fork server tells
            if self._lanes[member].is_late:
                self._slow.add(member)
        self._outbox.clear()

    def _send_rest(self) -> None:
        for member in list(self._slow):
            with contextlib.suppress(OSError):  # it is gone
                if not self._lanes[member].send_rest():
                    continue
            self._slow.discard(member)
