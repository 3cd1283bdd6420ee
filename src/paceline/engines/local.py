"""The local engine: members are processes on this machine.

    launcher (coordinator) --lane (socket pair)--> member 0, 1, ...
          \\--socket--> nursery --fork--> member 0, 1, ...
    control page, arena: memfd, inherited by all

This module must not know protocols, plans or terminals.
"""

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from ..errors import WorkerError
from ..events import Cancel, Fact, Grant, Late, Left, Order
from ..sessions.lane import Message, SocketLane, socket_pair
from ..store.control import ALARM, JOBS, Control, control_bytes
from ..store.memory import SharedMemory
from .base import Birth, Engine, Event, Push, Traits
from .jobs import Jobs, grant_message

_START_S = 120.0
_END_S = 2.0
_EVER = 2**31 - 1


class LocalEngine(Engine):
    """Processes on this machine, shared memory between them.

    Args:
        num_seats: workers.
        environment: variables for the nursery and the members, beside this process's.
    """

    traits = Traits(name="local", cancels=True, loses_members=True, has_store=True, is_spmd=True)

    def __init__(self, num_seats: int, environment: dict[str, str]) -> None:
        self._num_seats = num_seats
        self._page = SharedMemory.create(control_bytes(num_seats))
        self._arena = SharedMemory.create()
        self.control = Control(self._page, num_seats)
        self._seats: dict[int, int] = {}
        self._ends: dict[int, socket.socket] = {}
        self._by_descriptor: dict[int, int] = {}
        self._lanes: dict[int, SocketLane] = {}
        self._outbox: dict[int, list[Message]] = {}
        self._serials: dict[int, int] = {}
        self._poll = select.poll()
        self._is_closed = False
        """Usual wait for the next message."""
        self._early_ends: list[dict[str, int]] = []
        """Members that ended while others were still being born."""
        self._start_nursery(environment)

    def _start_nursery(self, environment: dict[str, str]) -> None:
        ours, theirs = socket_pair()
        self._nursery_end = ours
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "paceline.engines.nursery", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._poll.register(ours, select.POLLIN)

    # -- members --------------------------------------------------------------------------------

    def start(self, births: Sequence[Birth]) -> dict[int, tuple[int, int]]:
        """Fork these members; member -> (seat, pid)."""
        self._hear_nursery("ready")
        for birth in births:
            ours, theirs = socket_pair()
            descriptors = [theirs.fileno(), self._page.fd, self._arena.fd]
            text = json.dumps(asdict(birth)).encode()
            socket.send_fds(self._nursery_end, [text], descriptors)
            theirs.close()
            self._seats[birth.member] = birth.seat
            self._ends[birth.member] = ours
            self._lanes[birth.member] = SocketLane(ours)
            self._by_descriptor[ours.fileno()] = birth.member
            self._poll.register(ours, select.POLLIN)
        born = {}
        for birth in births:
            born[birth.member] = (birth.seat, int(self._hear_nursery("born")["pid"]))
        return born

    def _hear_nursery(self, kind: str) -> dict[str, int]:
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s:
            ready, _, _ = select.select([self._nursery_end], [], [], 0.5)
            if ready:
                data = self._nursery_end.recv(1 << 16)
                if data:
                    message: dict[str, int] = json.loads(data)
                    if kind in message:
                        return message
                    self._early_ends.append(message)
            if self._nursery.poll() is not None:
                raise WorkerError(
                    "the process that workers are forked from did not start "
                    f"(exit {self._nursery.returncode}); see the messages above"
                )
        raise WorkerError(f"workers could not be started within {_START_S:.0f} s")

    # -- the contract ---------------------------------------------------------------------------

    def events(self, timeout_s: float) -> Sequence[Event]:
        events: list[Event] = []
        ended = [_left(message) for message in self._early_ends]
        self._early_ends.clear()
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            member = self._by_descriptor.get(descriptor)
            if member is None:
                ended += self._reaped()
                continue
            try:
                events += [(member, message) for message in self._lanes[member].receive(False)]
            except OSError:
                self._poll.unregister(descriptor)
        for member, message in ended:
            self.control[self.control.gone[self._seats[member]]] = 1
            events += self._drain(member)
            events.append((member, message))
        return events

    def _reaped(self) -> list[Event]:
        """Members whose end the nursery tells."""
        try:
            data = self._nursery_end.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise WorkerError("the process that workers are forked from is gone")
        message = json.loads(data)
        return [_left(message)] if "ended" in message else []

    def _drain(self, member: int) -> list[Event]:
        """What a member had sent before it ended."""
        events: list[Event] = []
        try:
            while messages := self._lanes[member].receive(False):
                events += [(member, message) for message in messages]
        except OSError:
            return events
        return events

    def prepare_jobs(self, samples_per_update: int) -> None:
        self._jobs = Jobs(self._post, self._seats, lambda: self.control[JOBS], samples_per_update)

    def carry_out(self, orders: Sequence[Order], cause: Fact | None, push: Push | None) -> None:
        if isinstance(cause, Left):
            self._jobs.left(cause.member)
        self._jobs.settle(orders, cause, push)
        cancelled = []
        for order in orders:
            kind = type(order)
            if kind is Grant:
                ticket = order.ticket  # type: ignore[union-attr]
                self._serials[ticket.member] = ticket.serial
                self._post(ticket.member, grant_message(order))  # type: ignore[arg-type]
            elif kind is Cancel:
                cancelled.append(self._cancelled(order.member))  # type: ignore[union-attr]
            elif kind is Late:
                self._jobs.idle(order.ticket.member)  # type: ignore[union-attr]
        self._flush()
        # Last, so that who is woken finds its next grant already there and sleeps no second time.
        for index, serial in cancelled:
            self.control.set_and_wake(index, serial)

    def _cancelled(self, member: int) -> tuple[int, int]:
        """Which word tells a member that its work is called off, and its value."""
        return self.control.cancelled[self._seats[member]], self._serials[member] + 1

    def tell(self, member: int, message: Message) -> None:
        self._post(member, message)
        self._flush()

    def lay_out(self, num_bytes: int) -> None:
        self._arena.grow(num_bytes)

    def jump(self, version: int) -> None:
        self._jobs.jump(version)

    def alarm(self) -> None:
        self.control[ALARM] = 1
        for index in self.control.arrived:
            self.control.wake(index)

    def calm(self) -> int:
        self.control[ALARM] = 0
        return max(self.control[index] for index in self.control.arrived)

    def stop(self, members: Sequence[int]) -> None:
        self._jobs.forget()
        for member in members:
            self.control.set_and_wake(self.control.cancelled[self._seats[member]], _EVER)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._nursery_end.close()
        for end in self._ends.values():
            end.close()
        if not self._seats:  # it is still importing: nobody's child needs its care
            self._nursery.kill()
        try:
            self._nursery.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()

    # -- messages -------------------------------------------------------------------------------

    def _post(self, member: int, message: Message) -> None:
        self._outbox.setdefault(member, []).append(message)

    def _flush(self) -> None:
        for member, messages in self._outbox.items():
            try:
                self._lanes[member].send_all(messages)
            except OSError:
                continue  # it is gone; the nursery tells
        self._outbox.clear()


def _left(message: dict[str, int]) -> Event:
    """The nursery's word that a member ended, as an event."""
    code = message["code"]
    reason = f"killed by signal {-code}" if code < 0 else f"exit {code}"
    return message["ended"], ("left", reason, code)
