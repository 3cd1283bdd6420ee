"""The lean driver: a protocol in virtual time, with endless data and nothing kept but counts.

    heap -> push is there -> protocol.react -> decisions -> who goes to work, until when -> heap

It asks the very protocol objects that run live. What the coordinator does beside that, leases,
epochs and the check of every decision, does not change an endless run, so it is left out, and
that the decisions are the same, one by one, is held by a test (tests/engines/test_simulated.py).
The commonest event, a member that pushes and goes straight on, has a path of its own. This module
must not know leases, traces or tensors.
"""

import math
from collections.abc import Callable
from heapq import heappop, heapreplace

from ..conditions.world import Conditions
from ..events import Apply, Cancel, Decision, Fact, Joined, Left, Pushed, Release, Ticket
from ..protocols.base import SyncProtocol
from .agenda import Agenda, Change
from .counts import Counts

_NEW = tuple.__new__  # makes a NamedTuple at half the cost of its own constructor
_UPDATES_A_TURN = 256


class TimingRun:
    """One protocol under some conditions."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        self.counts = Counts()
        self.version = 0
        self._react = protocol.react
        self._agenda = Agenda(conditions)

    def run(
        self, num_updates: int, on_progress: Callable[[int], None] = lambda done: None
    ) -> Counts:
        """Go on until so many updates are made in all; ``on_progress`` hears of them at times."""
        if not self._agenda.current:
            self._take_next()  # the first worker comes: from here on there is a member
        while self.version < num_updates:
            aim = min(num_updates, self.version + _UPDATES_A_TURN)
            while self.version < aim:
                self._go_straight_on()
            on_progress(self.version)
        self.counts.there_s = self._agenda.seconds_there(self.counts.times_s[-1])
        return self.counts

    def _go_straight_on(self) -> None:
        """Members push and go straight on, until something else happens; that is done, too.

        Attributes are locals here and fields are indices, because each is read a million times.
        """
        agenda, react, version, used_s = self._agenda, self._react, self.version, 0.0
        heap, current, begun_s = agenda.heap, agenda.current, agenda.begun_s
        finishers, number, nan = agenda.finishers, agenda.number, math.nan
        while heap:
            at_s, _, ticket = heap[0]
            member = ticket[0]
            if current[member] is not ticket:
                break
            decisions = react(_NEW(Pushed, (ticket, 1, nan, True, at_s)))
            if len(decisions) != 1 or decisions[0] != (member, 1):
                heappop(heap)
                agenda.number, self.counts.used_s = number, self.counts.used_s + used_s
                self._after_push(ticket, decisions, at_s)
                return
            used_s += at_s - begun_s[member]
            begun_s[member] = at_s
            current[member] = ticket = _NEW(Ticket, (member, ticket[1] + 1, version))
            number += 1
            heapreplace(heap, (finishers[member](at_s), number, ticket))
        agenda.number, self.counts.used_s = number, self.counts.used_s + used_s
        self._take_next()

    # -- everything else ------------------------------------------------------------------------

    def _take_next(self) -> None:
        at_s, what = self._agenda.next()
        if type(what) is Change:
            self._changed(what, at_s)
        else:
            assert type(what) is Ticket
            self._after_push(what, self._react(Pushed(what, 1, math.nan, True, at_s)), at_s)

    def _after_push(self, ticket: Ticket, decisions: list[Decision], at_s: float) -> None:
        self.counts.used_s += self._agenda.end(ticket.member, at_s)
        self._carry_out(decisions, at_s)

    def _changed(self, change: Change, at_s: float) -> None:
        """A worker comes or goes."""
        agenda, counts = self._agenda, self.counts
        if change.is_there:
            fact: Fact = Joined(agenda.join(change.worker, at_s), at_s)
        else:
            member = agenda.leave(change.worker, at_s)
            if agenda.current[member] is not None:
                counts.wasted_s += agenda.end(member, at_s, is_called_off=True)
                counts.lost += 1
            fact = Left(member, at_s)
        self._carry_out(self._react(fact), at_s)

    def _carry_out(self, decisions: list[Decision], at_s: float) -> None:
        """In their order; who is released is granted after all of them, in member order."""
        agenda, counts = self._agenda, self.counts
        released: dict[int, int] = {}
        for decision in decisions:
            if isinstance(decision, Release):
                released[decision.member] = decision.num_steps
            elif isinstance(decision, Apply):
                counts.applied(decision.tickets, self.version, at_s)
                self.version += 1
            elif isinstance(decision, Cancel):
                if released.pop(decision.member, None) is None:
                    counts.wasted_s += agenda.end(decision.member, at_s, is_called_off=True)
                    counts.cancelled += 1
            else:
                counts.discarded += 1
        if released:
            members = sorted(released)
            next_serial, version = agenda.next_serial, self.version
            tickets = [Ticket(member, next_serial[member], version) for member in members]
            agenda.begin(tickets, [released[member] for member in members], at_s)
