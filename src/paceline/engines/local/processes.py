"""Members as processes that the fork server forks: begun, looked at, ended, begun again.

    launcher --socket--> fork server --fork--> member 0, 1, ...
    born, stopped, continued, ended <--/

The program lies in memory that has no name. This module must not know messages between members and
coordinator, nor what members share.
"""

import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from ...store.memory import SharedMemory
from ...system.limits import Toll
from ...system.vitals import Vitals, read_vitals
from ...wire.channel import socket_pair
from ..base import (
    Happening,
    HelperWoken,
    MemberSpec,
    ProcessBorn,
    ProcessContinued,
    Processes,
    ProcessLeft,
    ProcessStopped,
    Signs,
)
from . import client
from .stack import StackProbe


class LocalProcesses(Processes):
    """The processes of one run.

    Args:
        signs: of life, of the member on a seat.
        begins: called with a member and its seat before it is forked.
        inherited: descriptors that every member is born with, behind its own.
        exchange: ``module:function`` that makes the member's side of it.
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
        self._toll = Toll()
        self._program = SharedMemory.create()
        self._births: dict[int, MemberSpec] = {}
        """By seat: what its first member was told."""
        self._probes: dict[int, StackProbe] = {}
        self.seats: dict[int, int] = {}
        self._server = client.take()

    def start(self, births: Sequence[MemberSpec], program: bytes) -> dict[int, tuple[int, int]]:
        """Fork these members; member -> (seat, pid)."""
        self._program.grow(len(program))
        self._program.buffer[:] = program
        self._server.await_word("ready")
        for birth in births:
            self._births[birth.seat] = replace(birth, exchange=self._exchange)
            self._ask_for(self._births[birth.seat])
        for birth in births:
            self._probes[birth.member].pid = int(self._server.await_word("born")["pid"])
        return {one.member: (one.seat, self._probes[one.member].pid) for one in births}

    def fileno(self) -> int:
        """What can be read where something has happened."""
        return self._server.fileno()

    def events(self, *, is_ready: bool) -> list[tuple[int, Happening]]:
        """What has happened to members, without waiting.

        Args:
            is_ready: whether there is something to read.
        """
        events = [self._told(word) for word in self._server.early_words()]
        if self._server.woke_it():
            events.append((-1, HelperWoken("the process that workers are forked from")))
        if is_ready and (word := self._server.next_word()) is not None:
            events.append(self._told(word))
        return events

    def _told(self, word: dict[str, int]) -> tuple[int, Happening]:
        """The fork server's word as an event."""
        if "born" in word:
            member, pid = word["born"], word["pid"]
            self._probes[member].pid = pid
            return member, ProcessBorn(self.seats[member], pid)
        if "stopped" in word:
            return word["stopped"], ProcessStopped()
        if "continued" in word:
            return word["continued"], ProcessContinued()
        code = word["code"]
        reason = f"killed by signal {-code}" if code < 0 else f"exit {code}"
        if -code == signal.SIGKILL:
            reason += self._toll.explain()
        return word["ended"], ProcessLeft(reason, code)

    def _ask_for(self, birth: MemberSpec) -> None:
        """Let the fork server fork this member."""
        ours, theirs = socket_pair()
        probe = self._probes[birth.member] = StackProbe()
        self.seats[birth.member] = birth.seat
        self._begins(birth.member, birth.seat, ours)
        descriptors = [theirs.fileno(), probe.fd, self._program.fd, *self._inherited]
        self._server.ask_for(asdict(birth), descriptors)
        theirs.close()

    # -- the contract ---------------------------------------------------------------------------

    def spawn(self, member: int, seat: int, told: dict[str, object]) -> None:
        first = self._births[seat]
        self._ask_for(replace(first, member=member, context={**first.context, **told}))

    def end(self, member: int) -> None:
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
        """End them all."""
        client.give_back(self._server)
        for probe in self._probes.values():
            probe.close()
        self._program.close()
