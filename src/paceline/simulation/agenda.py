"""The events to come in virtual time, as a heap, and the work that each member is at.

    granted --pull--> coming --turns at a core--> done --push--> arrived: the member has pushed
       |                `-------- X -------------^  |              |
       `----------------------------`--------------`--------------`- called off, gone: no arrival

An entry of the heap is ``(at_s, number, event)``. The number counts entries, so events at the same
moment happen in the order in which they were entered. The event is the ticket whose push arrives, a
``Coming`` or ``Turn`` of work that needs a core, a ``WorkDone`` whose bytes still have to move, an
``AgendaChange`` when a worker comes or goes, or an ``EpochStart`` or a ``Strike`` that a driver has
entered. Work that is called off stays in the heap, and is skipped because its ticket is no longer
current.

Above 300 lines, since every kind of event is handled here. This module must not know protocols.
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
    """The work of a ticket is computed; its bytes still have to arrive."""

    member: int
    ticket: Ticket


class Coming(NamedTuple):
    """A member that is at work on a ticket wants a core."""

    member: int
    ticket: Ticket


class AgendaChange(NamedTuple):
    """A worker comes or goes. ``member`` is `NOBODY`, so that it equals no member's ticket."""

    member: int
    worker: int
    is_there: bool


class EpochStart(NamedTuple):
    """The next epoch opens. ``member`` is `NOBODY`."""

    member: int


class Strike(NamedTuple):
    """A fault happens, or is noticed, as its driver knows. ``member`` is `NOBODY`."""

    member: int
    event: object


Event: TypeAlias = Ticket | Coming | Turn | WorkDone | AgendaChange | EpochStart | Strike
Entry: TypeAlias = tuple[float, int, Event]


class Agenda:
    """The members, their work, and the events to come.

    Args:
        overlap_steps: steps that members compute, if all begin together, while their pushes are
            summed; they wait for the pull after this many steps of the next work.

    Attributes:
        heap: the entries to come; a driver that knows the drawing above may read and replace them.
        next_number: returns the number of the next entry.
        current: the ticket that each member is at work on, by member.
        begun_s: when each member began to compute, by member.
        next_serial: the serial of a member's next ticket while it is not at work, by member.
        finishers: the function that returns when a step is done, by member.
        worker_of: the worker of each member, by member.
        member_of: the present member of each worker.
        by_worker: the finishers by worker.
    """

    def __init__(self, conditions: Conditions, overlap_steps: int = 0) -> None:
        self._overlap_steps = 0 if conditions.link is None else overlap_steps
        if self._overlap_steps and conditions.machine is not None:
            raise ConfigError(
                f"--overlap {overlap_steps} with --like and --link: how much of a measured "
                "exchange overlaps with the next steps is unknown; set step times by --delay "
                "instead of --like, or leave --link out"
            )
        self._all_done_s = 0.0  # when the last of the members that push together had computed
        self.heap: list[Entry] = []
        self.next_number = count().__next__
        self.current: list[Ticket | None] = []
        self.begun_s: list[float] = []
        self.next_serial: list[int] = []
        self.finishers: list[Finisher] = []
        self.worker_of: list[int] = []
        self.member_of: dict[int, int] = {}
        self._done_s: list[float] = []  # if bytes cost time; else pushes arrive when they are done
        self._from_s: dict[int, float] = {}  # when a member's first turn at a shared core began
        self.by_worker = [conditions.finisher(worker) for worker in range(conditions.num_workers)]
        link = conditions.link
        self._lanes = None if link is None else (LinkQueue(link), LinkQueue(link))  # pulls, pushes
        self._queues, self._cores = conditions.server_queues(), conditions.cores()
        machine = conditions.machine
        self._sum = None if machine is None else CostSum(machine.add_s, machine.apply_s)
        self._num_dead = 0
        self._joined_s: dict[int, float] = {}
        self._past_present_s = 0.0
        absent = {absence.worker for absence in conditions.absences if absence.from_s == 0.0}
        for worker in range(conditions.num_workers):
            if worker not in absent:
                self.enter(0.0, AgendaChange(NOBODY, worker, True))
        for absence in conditions.absences:
            if absence.from_s > 0.0:
                self.enter(absence.from_s, AgendaChange(NOBODY, absence.worker, False))
            if absence.until_s < _NEVER_S:
                self.enter(absence.until_s, AgendaChange(NOBODY, absence.worker, True))

    @property
    def is_direct(self) -> bool:
        """Whether only the delays take time, so that a push arrives when its delay is over."""
        return self._lanes is None and self._queues is None

    # -- members --------------------------------------------------------------------------------

    def join(self, worker: int, at_s: float) -> int:
        """Add a member at a worker's seat, and return its number."""
        member = len(self.current)
        self.current.append(None)
        self.begun_s.append(at_s)
        self.next_serial.append(0)
        self._done_s.append(_NEVER_S)
        self.finishers.append(self.by_worker[worker])
        self.worker_of.append(worker)
        self.member_of[worker] = member
        self._joined_s[member] = at_s
        return member

    def leave(self, worker: int, at_s: float) -> int:
        """Remove the member at a worker's seat, and return it; the driver ends its work."""
        member = self.member_of.pop(worker)
        self._past_present_s += at_s - self._joined_s.pop(member)
        return member

    def seconds_there(self, at_s: float) -> float:
        """The seconds that workers were present until ``at_s``, summed."""
        return self._past_present_s + sum(at_s - since_s for since_s in self._joined_s.values())

    # -- work -----------------------------------------------------------------------------------

    def begin(
        self,
        tickets: Sequence[Ticket],
        num_steps: Sequence[int],
        at_s: float,
        *,
        is_updated: bool = False,
    ) -> None:
        """Let members begin work.

        Args:
            tickets: one for each member.
            num_steps: the steps of each ticket.
            at_s: when they are granted.
            is_updated: whether the version that they work with is made at this moment.
        """
        new: list[Entry] = []
        next_number, boundary_s = self.next_number, self._all_done_s
        if self._sum is not None and (tickets or is_updated):
            at_s = self._sum.ready_s(at_s, is_updated=is_updated)
        for ticket, steps in zip(tickets, num_steps, strict=True):
            member = ticket[0]
            self.current[member] = ticket
            begun_s = at_s if self._lanes is None else self._lanes[0].there_s(at_s)
            if self._queues is None:
                if self._overlap_steps and is_updated and ticket[1]:
                    begun_s, done_s = self._overlapped_span(member, steps, (boundary_s, begun_s))
                else:
                    finish, done_s = self.finishers[member], begun_s
                    for _ in range(steps):
                        done_s = finish(done_s)
                new.append((done_s, next_number(), self._computed_event(ticket, begun_s, done_s)))
                continue
            queue = self._queues[self.worker_of[member]]
            busy_s = queue.take(steps)
            if self._cores is None:
                begun_s, done_s = queue.finish(begun_s, begun_s + busy_s)
                new.append((done_s, next_number(), self._computed_event(ticket, begun_s, done_s)))
            else:
                self.begun_s[member] = _NEVER_S
                new.append((begun_s, next_number(), Coming(member, ticket)))
        heap = self.heap
        if len(new) * 8 > len(heap):
            heap += new
            heapify(heap)
        else:
            for entry in new:
                heappush(heap, entry)

    def end(self, member: int, at_s: float, *, is_called_off: bool = False) -> float:
        """End a member's work, and return the seconds that it has computed."""
        self.next_serial[member] = self.current[member][1] + 1  # type: ignore[index]  # it is at work
        self.current[member] = None
        if is_called_off and self._cores is not None and member in self._cores:
            self._enter_turn(self._cores.leave(member, at_s))
        elif is_called_off:
            self._num_dead += 1
            if self._num_dead > 1000 and 2 * self._num_dead > len(self.heap):
                self._remove_dead()
        else:
            if self._sum is not None:
                self._sum.push(at_s)
            if self._overlap_steps:  # not when it begins: work that is called off is in no update
                self._all_done_s = max(self._all_done_s, self._done_s[member])
        begun_s, end_s = self.begun_s[member], min(at_s, self._done_s[member])
        self._done_s[member] = _NEVER_S
        return end_s - begun_s if begun_s < end_s else 0.0

    def refuse(self) -> None:
        """Note that the push that arrived last is not used."""
        if self._sum is not None:
            self._sum.refuse()

    def withdraw(self, ticket: Ticket) -> None:
        """Remove the event of a ticket's push, which will no longer arrive by itself."""
        self.heap[:] = [entry for entry in self.heap if entry[2] is not ticket]
        heapify(self.heap)

    def _remove_dead(self) -> None:
        """Remove work that was called off from the heap."""
        self.heap[:] = [entry for entry in self.heap if self._is_alive(entry[2])]
        heapify(self.heap)
        self._num_dead = 0

    def _is_alive(self, event: Event) -> bool:
        if isinstance(event, AgendaChange | EpochStart | Strike | Turn):
            return True
        ticket = event.ticket if isinstance(event, Coming | WorkDone) else event
        return self.current[event.member] is ticket

    # -- computing ------------------------------------------------------------------------------

    def _computed_event(self, ticket: Ticket, begun_s: float, done_s: float) -> Event:
        """Return the event at the end of a ticket's work, whose begin and end are now known."""
        member = ticket[0]
        self.begun_s[member] = begun_s
        if self._lanes is None:
            return ticket
        self._done_s[member] = done_s
        return WorkDone(member, ticket)

    def _overlapped_span(
        self, member: int, steps: int, way_s: tuple[float, float]
    ) -> tuple[float, float]:
        """Return when overlapped work, which begins before its version arrives, begins and ends.

        Args:
            way_s: when all members had computed what the version is made of, and when it arrives.

        Returns:
            The begin as if the member had waited before its work instead of in the midst of it,
            and the end.
        """
        finish, waited_s = self.finishers[member], 0.0
        begun_s, arrival_s = way_s
        done_s = begun_s
        for step in range(1, steps + 1):
            done_s = finish(done_s)
            if step == min(steps, self._overlap_steps):
                waited_s = max(0.0, arrival_s - done_s)
                done_s += waited_s
        return begun_s + waited_s, done_s

    def _queue_for_core(self, member: int, at_s: float) -> None:
        """Let a member that wants a core queue for it."""
        assert self._cores is not None
        assert self._queues is not None
        self._enter_turn(
            self._cores.enter(member, at_s, self._queues[self.worker_of[member]].busy_s)
        )

    def _enter_turn(self, turn: Turn | None) -> None:
        """Enter a turn at a core that begins now, if there is one."""
        if turn is None:
            return
        assert self._queues is not None
        if self.begun_s[turn.member] == _NEVER_S:
            self._from_s[turn.member] = turn.from_s
            exchange_s = self._queues[self.worker_of[turn.member]].exchange_s
            self.begun_s[turn.member] = turn.from_s + exchange_s
        self.enter(turn.until_s, turn)

    def _end_turn(self, turn: Turn) -> None:
        """Handle the end of a turn at a core, unless it was called off before."""
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
            self.enter(done_s, self._computed_event(ticket, begun_s, done_s))
        self._enter_turn(following)

    # -- time -----------------------------------------------------------------------------------

    def next(self) -> tuple[float, Ticket | AgendaChange | EpochStart | Strike]:
        """Remove and return the next event that a driver handles: all but turns and computing."""
        while self.heap:
            at_s, _, event = heappop(self.heap)
            if type(event) is AgendaChange or type(event) is EpochStart or type(event) is Strike:
                return at_s, event
            if type(event) is Turn:
                self._end_turn(event)
            elif not self._is_alive(event):
                self._num_dead -= 1
            elif type(event) is Coming:
                self._queue_for_core(event.member, at_s)
            elif type(event) is WorkDone:
                assert self._lanes is not None
                self.enter(self._lanes[1].there_s(at_s), event.ticket)
            else:
                return at_s, event  # type: ignore[return-value]  # a ticket
        raise ConfigError(
            "all workers are gone and none returns: the run cannot continue; leave one worker "
            "there, or stop after fewer --updates"
        )

    def enter(self, at_s: float, event: Event) -> None:
        """Enter an event at a time."""
        heappush(self.heap, (at_s, self.next_number(), event))
