"""What happens next in virtual time: a heap of events, and who is at work on what.

    granted --pull--> coming --turns at a core--> done --push--> there: the member has pushed
       |                `-------- X -------------^  |              |
       `----------------------------`--------------`--------------`- called off, gone: never there

An entry of the heap is ``(at_s, number, what)``; the number counts entries, so what falls on the
same moment happens in the order in which it was entered. ``what`` is the ticket whose push is
there, or a ``WorkDone`` whose bytes still have to move, or a ``AgendaChange`` of who is there, or a
``Strike`` that a driver has put there. Work that is
called off stays in the heap, and is passed over because its ticket is no longer current.
Above 300 lines, since whatever may come next is here. This module must not know protocols.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, TypeAlias

from ..conditions.machine import CostSum, Turn
from ..conditions.world import Conditions, Finisher, LinkQueue
from ..errors import ConfigError
from ..events import Ticket

_NEVER_S = float("inf")
NOBODY = -1


class WorkDone(NamedTuple):
    """The work of a ticket is computed; its bytes are not there yet."""

    member: int
    ticket: Ticket


class Coming(NamedTuple):
    """Who is at work on a ticket wants a core."""

    member: int
    ticket: Ticket


class AgendaChange(NamedTuple):
    """A worker comes or goes. ``member`` is none, so that it is never anybody's ticket."""

    member: int
    worker: int
    is_there: bool


class Strike(NamedTuple):
    """Something goes wrong, or is noticed; what it is only its driver knows. ``member`` is none."""

    member: int
    what: object


What: TypeAlias = Ticket | Coming | Turn | WorkDone | AgendaChange | Strike
Entry: TypeAlias = tuple[float, int, What]


class Agenda:
    """Members, their work, and what comes next.

    Args:
        overlap_steps: that members go on for, where all begin together, while what they pushed is
            summed: the pull is waited for after so many steps of the next work.

    Attributes:
        heap: entries to come; a driver that knows the drawing above may read and replace them.
        next_number: of the next entry.
        current: the ticket that a member is at work on, by member.
        begun_s: when it began to compute, by member.
        next_serial: of the next ticket of a member that is not at work.
        finishers: by member.
    """

    def __init__(self, conditions: Conditions, overlap_steps: int = 0) -> None:
        self._overlap_steps = 0 if conditions.link is None else overlap_steps
        if self._overlap_steps and conditions.machine is not None:
            raise ConfigError(
                f"--overlap {overlap_steps} with --like and --link: nobody knows what of a "
                "measured exchange the next steps hide; give steps by --delay instead of --like, "
                "or leave --link out"
            )
        self._all_done_s = 0.0  # when the last of those that push together had computed
        self.heap: list[Entry] = []
        self.next_number = count().__next__
        self.current: list[Ticket | None] = []
        self.begun_s: list[float] = []
        self.next_serial: list[int] = []
        self.finishers: list[Finisher] = []
        self.worker_of: list[int] = []
        self.member_of: dict[int, int] = {}
        self._done_s: list[float] = []  # where bytes cost something; else a push is there when done
        self._from_s: dict[int, float] = {}  # the first turn, where cores are shared
        self.by_worker = [conditions.finisher(one) for one in range(conditions.num_workers)]
        link = conditions.link
        self._lanes = None if link is None else (LinkQueue(link), LinkQueue(link))  # pulls, pushes
        self._queues, self._cores = conditions.server_queues(), conditions.cores()
        machine = conditions.machine
        self._sum = None if machine is None else CostSum(machine.add_s, machine.apply_s)
        self._num_dead = 0
        self._there_since_s: dict[int, float] = {}
        self._there_s = 0.0
        late = {one.worker for one in conditions.absences if one.from_s == 0.0}
        for worker in range(conditions.num_workers):
            if worker not in late:
                self.enter(0.0, AgendaChange(NOBODY, worker, True))
        for one in conditions.absences:
            if one.from_s > 0.0:
                self.enter(one.from_s, AgendaChange(NOBODY, one.worker, False))
            if one.until_s < _NEVER_S:
                self.enter(one.until_s, AgendaChange(NOBODY, one.worker, True))

    @property
    def is_direct(self) -> bool:
        """Whether nothing but the delays takes time: a push is there when its delay is over."""
        return self._lanes is None and self._queues is None

    # -- members --------------------------------------------------------------------------------

    def join(self, worker: int, at_s: float) -> int:
        """A new member at this worker's seat."""
        member = len(self.current)
        self.current.append(None)
        self.begun_s.append(at_s)
        self.next_serial.append(0)
        self._done_s.append(_NEVER_S)
        self.finishers.append(self.by_worker[worker])
        self.worker_of.append(worker)
        self.member_of[worker] = member
        self._there_since_s[member] = at_s
        return member

    def leave(self, worker: int, at_s: float) -> int:
        """The member at this seat is gone; its work is to be ended before."""
        member = self.member_of.pop(worker)
        self._there_s += at_s - self._there_since_s.pop(member)
        return member

    def seconds_there(self, at_s: float) -> float:
        """Seconds that workers were there until now, summed."""
        return self._there_s + sum(at_s - since_s for since_s in self._there_since_s.values())

    # -- work -----------------------------------------------------------------------------------

    def begin(
        self,
        tickets: Sequence[Ticket],
        num_steps: Sequence[int],
        at_s: float,
        *,
        is_updated: bool = False,
    ) -> None:
        """These members go to work; ``is_updated``: with a version that is only now made."""
        fresh: list[Entry] = []
        next_number, boundary_s = self.next_number, self._all_done_s
        if self._sum is not None and (tickets or is_updated):
            at_s = self._sum.ready_s(at_s, is_updated=is_updated)
        for ticket, steps in zip(tickets, num_steps, strict=True):
            member = ticket[0]
            self.current[member] = ticket
            begun_s = at_s if self._lanes is None else self._lanes[0].there_s(at_s)
            if self._queues is None:
                if self._overlap_steps and is_updated and ticket[1]:
                    begun_s, done_s = self._overlapped(member, steps, (boundary_s, begun_s))
                else:
                    finish, done_s = self.finishers[member], begun_s
                    for _ in range(steps):
                        done_s = finish(done_s)
                fresh.append((done_s, next_number(), self._computed(ticket, begun_s, done_s)))
                continue
            queue = self._queues[self.worker_of[member]]
            busy_s = queue.take(steps)
            if self._cores is None:
                begun_s, done_s = queue.finish(begun_s, begun_s + busy_s)
                fresh.append((done_s, next_number(), self._computed(ticket, begun_s, done_s)))
            else:
                self.begun_s[member] = _NEVER_S
                fresh.append((begun_s, next_number(), Coming(member, ticket)))
        heap = self.heap
        if len(fresh) * 8 > len(heap):
            heap += fresh
            heapify(heap)
        else:
            for entry in fresh:
                heappush(heap, entry)

    def end(self, member: int, at_s: float, *, is_called_off: bool = False) -> float:
        """The member stops working; returns the seconds that it has computed."""
        self.next_serial[member] = self.current[member][1] + 1  # type: ignore[index]  # it works
        self.current[member] = None
        if is_called_off and self._cores is not None and member in self._cores:
            self._take(self._cores.leave(member, at_s))
        elif is_called_off:
            self._num_dead += 1
            if self._num_dead > 1000 and 2 * self._num_dead > len(self.heap):
                self._bury()
        elif self._sum is not None:
            self._sum.push(at_s)
        begun_s, done_s = self.begun_s[member], min(at_s, self._done_s[member])
        self._done_s[member] = _NEVER_S
        return done_s - begun_s if begun_s < done_s else 0.0

    def refuse(self) -> None:
        """The push that ended last is not used."""
        if self._sum is not None:
            self._sum.refuse()

    def withdraw(self, ticket: Ticket) -> None:
        """The push of this work does not come by itself any longer."""
        self.heap[:] = [one for one in self.heap if one[2] is not ticket]
        heapify(self.heap)

    def _bury(self) -> None:
        """Take out of the heap what was called off."""
        self.heap[:] = [entry for entry in self.heap if self._is_alive(entry[2])]
        heapify(self.heap)
        self._num_dead = 0

    def _is_alive(self, what: What) -> bool:
        if isinstance(what, AgendaChange | Strike | Turn):
            return True
        ticket = what.ticket if isinstance(what, Coming | WorkDone) else what
        return self.current[what.member] is ticket

    # -- computing ------------------------------------------------------------------------------

    def _computed(self, ticket: Ticket, begun_s: float, done_s: float) -> What:
        """When a ticket's work begins and is done is known; what then happens."""
        member = ticket[0]
        self.begun_s[member] = begun_s
        if self._lanes is None:
            return ticket
        self._done_s[member] = done_s
        if self._overlap_steps:
            self._all_done_s = max(self._all_done_s, done_s)
        return WorkDone(member, ticket)

    def _overlapped(
        self, member: int, steps: int, on_its_way_s: tuple[float, float]
    ) -> tuple[float, float]:
        """When work begins and is done that goes on while its version is on its way.

        Args:
            on_its_way_s: when all had computed what it is made of, and when it has come.

        Returns:
            The first as if it had waited before, and not in the midst of it.
        """
        finish, waited_s = self.finishers[member], 0.0
        begun_s, there_s = on_its_way_s
        done_s = begun_s
        for number in range(1, steps + 1):
            done_s = finish(done_s)
            if number == min(steps, self._overlap_steps):
                waited_s = max(0.0, there_s - done_s)
                done_s += waited_s
        return begun_s + waited_s, done_s

    def _came(self, member: int, at_s: float) -> None:
        """A member wants a core."""
        assert self._cores is not None
        assert self._queues is not None
        self._take(self._cores.enter(member, at_s, self._queues[self.worker_of[member]].busy_s))

    def _take(self, turn: Turn | None) -> None:
        """Somebody has a core from now on."""
        if turn is None:
            return
        assert self._queues is not None
        if self.begun_s[turn.member] == _NEVER_S:
            self._from_s[turn.member] = turn.from_s
            exchange_s = self._queues[self.worker_of[turn.member]].exchange_s
            self.begun_s[turn.member] = turn.from_s + exchange_s
        self.enter(turn.until_s, turn)

    def _turned(self, turn: Turn) -> None:
        """A turn is over, or was called off before."""
        assert self._cores is not None
        assert self._queues is not None
        if not self._cores.is_under_way(turn):
            return
        member = turn.member
        is_done, following = self._cores.pass_on(turn)
        if is_done:
            ticket, queue = self.current[member], self._queues[self.worker_of[member]]
            assert ticket is not None
            begun_s, done_s = queue.finish(self._from_s.pop(member), turn.until_s)
            self.enter(done_s, self._computed(ticket, begun_s, done_s))
        self._take(following)

    # -- time -----------------------------------------------------------------------------------

    def next(self) -> tuple[float, Ticket | AgendaChange | Strike]:
        """Take out the next thing that matters: a push that is there, or a change."""
        while self.heap:
            at_s, _, what = heappop(self.heap)
            if type(what) is AgendaChange or type(what) is Strike:
                return at_s, what
            if type(what) is Turn:
                self._turned(what)
            elif not self._is_alive(what):
                self._num_dead -= 1
            elif type(what) is Coming:
                self._came(what.member, at_s)
            elif type(what) is WorkDone:
                assert self._lanes is not None
                self.enter(self._lanes[1].there_s(at_s), what.ticket)
            else:
                return at_s, what  # type: ignore[return-value]  # all else
        raise ConfigError(
            "everybody is gone and nobody returns: the run cannot go on; leave one worker there, "
            "or stop after fewer --updates"
        )

    def enter(self, at_s: float, what: What) -> None:
        """Let this happen then."""
        heappush(self.heap, (at_s, self.next_number(), what))
