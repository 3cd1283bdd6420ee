"""An engine whose members share no memory: words and bytes go through sockets of this process.

    member 0 --Wrote, Filled--> engine --Wrote, Filled, job--> member 1, 2, ...

Every member has the whole store and does every job (``socket_member.py``), so a job of one that
dies is done already. The members are processes as in the local engine, without shared memory. An
engine for a cluster can be made from it.
"""

import socket
from collections.abc import Sequence
from typing import Any

from paceline.engines.base import Engine, Event, MemberSpec, ProcessLeft, Signs, StoreView, Traits
from paceline.engines.local.engine import LocalProcesses
from paceline.engines.local.switchboard import Switchboard
from paceline.store.control import INSIDE, JOBS, LAYOUT, VERSION, Control, control_bytes
from paceline.store.memory import PrivateMemory
from paceline.wire.channel import SocketChannel
from paceline.wire.messages import Add, Copy, Finish, Job, Laid, Skip, ToMember
from socket_member import DOWN, UP, Ask, Filled, Pass, Pinned, Stands, Wrote

_JOBS = (Add, Finish, Skip, Copy)


class SocketEngine(Engine):
    """Processes, and messages between them.

    Args:
        num_seats: workers.
    """

    traits = Traits(name="sockets", cancels=True, loses_members=True, has_store=True, is_spmd=False)
    processes: LocalProcesses

    def __init__(self, num_seats: int) -> None:
        page = PrivateMemory(control_bytes(num_seats))
        self._control, self._memory = Control(page, num_seats), PrivateMemory()
        self.processes = LocalProcesses(
            self._signs, self._begins, [], "socket_member:exchange_over_sockets"
        )
        self._switchboard = Switchboard(self.processes.fileno(), _channel)
        self._alive: list[int] = []
        """Who hears what others write: a newcomer from when it is told of the store."""
        self._data: dict[int, bytes] = {}
        """By seat: what it has pushed, until the job that needs it is sent."""
        self._job = 0
        self._waiting: dict[int, list[Any]] = {}
        """What newcomers hear as soon as they have what stands."""
        self._donors: dict[int, int] = {}
        self._is_closed = False

    # -- the contract ---------------------------------------------------------------------------

    def start(self, specs: Sequence[MemberSpec], program: bytes) -> dict[int, tuple[int, int]]:
        return self.processes.start(specs, program)

    def events(self, timeout_s: float) -> Sequence[Event]:
        said, is_ready = self._switchboard.hear(timeout_s)
        events = self._relay(said)
        for member, happening in self.processes.events(is_ready=is_ready):
            if isinstance(happening, ProcessLeft):
                events += self._relay(self._switchboard.hang_up(member))
                self._left(member)
            events.append((member, happening))
        return events

    def send(self, messages: Sequence[tuple[int, ToMember]]) -> None:
        for member, message in messages:
            if isinstance(message, _JOBS):
                self._spread(member, message)
            elif isinstance(message, Laid) and self._control[LAYOUT]:
                self._alive.append(member)
                self._waiting[member] = [message]
                self._ask(member)
            else:
                self._post(member, message)

    def cancel(self, member: int, serial: int) -> None:
        index = self._control.cancelled[self.processes.seats[member]]
        self._post(member, Wrote(index, serial + 1))

    def lay_out(self, num_bytes: int) -> StoreView:
        self._memory.grow(num_bytes)
        return StoreView(self._memory, self._control)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.processes.close()
            self._switchboard.close()

    # -- members --------------------------------------------------------------------------------

    def _begins(self, member: int, seat: int, end: socket.socket) -> None:
        self._switchboard.open(member, end)
        if not self._control[LAYOUT]:
            self._alive.append(member)

    def _left(self, member: int) -> None:
        if member in self._alive:
            self._alive.remove(member)
        self._waiting.pop(member, None)
        for newcomer in [one for one, donor in self._donors.items() if donor == member]:
            self._ask(newcomer)

    def _signs(self, seat: int) -> Signs:
        control = self._control
        return Signs(control[control.beats[seat]], 0, control[INSIDE] == seat + 1)

    def _ask(self, newcomer: int) -> None:
        """Let a member send it the current store."""
        donors = [one for one in self._alive if one not in self._waiting]
        if donors:
            self._donors[newcomer] = donors[0]
            self._post(donors[0], Ask(newcomer, self._job))

    # -- messages -------------------------------------------------------------------------------

    def _post(self, member: int, message: Any) -> None:
        if member in self._waiting:
            self._waiting[member].append(message)
        else:
            self._switchboard.send([(member, message)])

    def _spread(self, holder: int, job: Job) -> None:
        """All do a job of one; only its holder copies."""
        if job.job <= self._job:
            return  # its owner has left, and all others have it
        self._job = job.job
        seat = job.seat if isinstance(job, Add | Finish) else -1
        data = self._data.pop(seat, None)
        for member in self._alive:
            if isinstance(job, Copy) and member != holder:
                self._post(member, Pass(job.job))
                continue
            if seat >= 0 and self.processes.seats[member] != seat:
                assert data is not None, f"{job} and nothing was pushed"
                self._post(member, Filled(seat, data))
            self._post(member, job)

    def _relay(self, said: Sequence[tuple[int, Any]]) -> list[Event]:
        """Relay messages for the others; the rest is for the coordinator."""
        events: list[Event] = []
        for member, message in said:
            if isinstance(message, Wrote):
                self._wrote(member, *message)
            elif isinstance(message, Filled):
                self._data[message.seat] = message.data
            elif isinstance(message, Stands):
                self._stands(member, message)
            elif isinstance(message, Pinned):
                stop = message.start + len(message.data)
                self._memory.buffer[message.start : stop] = message.data
            else:
                events.append((member, message))
        return events

    def _wrote(self, member: int, index: int, value: int) -> None:
        control = self._control
        if index in (JOBS, VERSION):
            control[index] = max(control[index], value)
            return
        control[index] = value
        if index not in control.beats:
            for other in self._alive:
                if other != member:
                    self._post(other, Wrote(index, value))

    def _stands(self, member: int, message: Stands) -> None:
        if message.member < 0:
            for other in self._alive:
                if other != member:
                    self._post(other, message)
        elif message.member in self._waiting:
            self._donors.pop(message.member, None)
            messages = self._waiting.pop(message.member)
            self._switchboard.send([(message.member, one) for one in (message, *messages)])


def _channel(end: socket.socket) -> SocketChannel[Any, Any]:
    return SocketChannel(end, DOWN, UP, waits=False)
