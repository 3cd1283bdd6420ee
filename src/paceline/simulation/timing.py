"""Simulates only the timing of a protocol: the data is endless, and only counts are kept.

    protocol, conditions -> bulk.py, if both are plain: many updates at once, on arrays
                         `> LeanDriver, otherwise: one event after another
                                                                              -> counts
    LeanDriver: heap -> push arrives -> protocol.react -> decisions -> members begin work -> heap

It asks the same protocol objects that run live. What else the coordinator does, leases, epochs and
the check of every decision, does not change an endless run, so it is left out; that the decisions
are the same, one by one, is tested by tests/simulation/test_simulated.py. The most frequent event,
a member that pushes and goes straight on, has a path of its own. Both drivers give the same updates
at the same times, with the same staleness (tests/simulation/test_bulk.py). This module must not
know leases, traces or tensors.
"""

import math
from collections.abc import Callable
from heapq import heappop, heapreplace
from typing import Protocol

from ..conditions.world import Conditions
from ..core.stats import Counts
from ..events import Apply, Cancel, Decision, Discard, Fact, Joined, Left, Pushed, Release, Ticket
from ..protocols.base import SyncProtocol
from .agenda import Agenda, AgendaChange
from .bulk import bulk_driver

_PUSHES_A_TURN = 50_000
"""About how many pushes lie between two reports of the progress."""
_UPDATES_A_TURN = 256
"""The fewest updates between two reports of the progress."""

_NEW = tuple.__new__  # makes a NamedTuple at half the cost of its own constructor
_NOTHING = (math.inf, 0, AgendaChange(-1, -1, False))


class Driver(Protocol):
    """Makes virtual time pass."""

    counts: Counts

    def advance(self, num_updates: int) -> None:
        """Go on until ``num_updates`` are made in all, counting them."""

    def there_s(self, at_s: float) -> float:
        """The seconds that workers were present until ``at_s``, summed."""


class TimingRun:
    """A run of one protocol under given conditions, with the fastest driver that fits."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        self._driver: Driver = bulk_driver(protocol, conditions) or LeanDriver(protocol, conditions)
        self._turn = max(_UPDATES_A_TURN, _PUSHES_A_TURN // protocol.num_pushes)

    def run(
        self, num_updates: int, on_progress: Callable[[int], None] = lambda done: None
    ) -> Counts:
        """Go on until ``num_updates`` are made in all, and return the counts.

        Args:
            on_progress: called now and then with the number of updates made.
        """
        driver, counts = self._driver, self._driver.counts
        while counts.updates < num_updates:
            driver.advance(min(num_updates, counts.updates + self._turn))
            on_progress(counts.updates)
        counts.there_s = driver.there_s(counts.times_s[-1])
        return counts


class LeanDriver:
    """Drives one protocol event by event, under any conditions."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        self.counts = Counts()
        self.version = 0
        self._react = protocol.react
        if protocol.staleness.drops:  # other staleness rules change steps, but no times
            self._react = lambda fact: protocol.answer(fact, self.version)
        self._agenda = Agenda(conditions, protocol.streaming.overlap_steps)

    def advance(self, num_updates: int) -> None:
        """Go on until ``num_updates`` are made in all.

        Attributes are copied to locals and fields are read by index, because each is read a million
        times.
        """
        agenda, react, version, used_s = self._agenda, self._react, self.version, 0.0
        heap, current, begun_s, nan = agenda.heap, agenda.current, agenda.begun_s, math.nan
        finishers, next_number, is_direct = agenda.finishers, agenda.next_number, agenda.is_direct
        if not current:
            self._handle_next()  # the first worker comes, so that there is a member
        while version < num_updates:
            at_s, _, ticket = heap[0] if heap else _NOTHING
            member = ticket[0]
            if current[member] is not ticket:
                self._handle_next()
                version = self.version
                continue
            decisions = react(_NEW(Pushed, (ticket, 1, nan, True, at_s, None, (), ())))
            if is_direct and len(decisions) == 1 and decisions[0] == (member, 1):
                used_s += at_s - begun_s[member]
                begun_s[member] = at_s
                current[member] = next_ticket = _NEW(Ticket, (member, ticket[1] + 1, version))
                heapreplace(heap, (finishers[member](at_s), next_number(), next_ticket))
                continue
            heappop(heap)
            self._count_seconds(agenda.end(member, at_s), decisions)
            if decisions:
                self._apply_decisions(decisions, at_s)
                version = self.version
        self.counts.used_s += used_s

    def there_s(self, at_s: float) -> float:
        return self._agenda.seconds_there(at_s)

    # -- everything else ------------------------------------------------------------------------

    def _handle_next(self) -> None:
        at_s, event = self._agenda.next()
        if type(event) is AgendaChange:
            self._changed(event, at_s)
        else:
            assert type(event) is Ticket
            decisions = self._react(Pushed(event, 1, math.nan, True, at_s))
            self._count_seconds(self._agenda.end(event.member, at_s), decisions)
            self._apply_decisions(decisions, at_s)

    def _count_seconds(self, seconds: float, decisions: list[Decision]) -> None:
        """Count the seconds of a push as used, or as wasted if it is discarded."""
        if decisions and type(decisions[0]) is Discard:
            self.counts.wasted_s += seconds
            self._agenda.refuse()
        else:
            self.counts.used_s += seconds

    def _changed(self, change: AgendaChange, at_s: float) -> None:
        """Handle a worker that comes or goes."""
        agenda, counts = self._agenda, self.counts
        if change.is_there:
            fact: Fact = Joined(agenda.join(change.worker, at_s), at_s)
        else:
            member = agenda.leave(change.worker, at_s)
            if agenda.current[member] is not None:
                counts.wasted_s += agenda.end(member, at_s, is_called_off=True)
                counts.lost += 1
            fact = Left(member, at_s)
        self._apply_decisions(self._react(fact), at_s)

    def _apply_decisions(self, decisions: list[Decision], at_s: float) -> None:
        """Carry out decisions in order; then grant work to the released members, by number."""
        agenda, counts, old_version = self._agenda, self.counts, self.version
        released: dict[int, int] = {}
        for decision in decisions:
            if type(decision) is Release:  # not isinstance: an update may release thousands
                released[decision[0]] = decision[1]
            elif isinstance(decision, Apply):
                counts.applied(decision.tickets, self.version, at_s)
                self.version += 1
            elif isinstance(decision, Cancel):
                if released.pop(decision.member, None) is None:
                    counts.wasted_s += agenda.end(decision.member, at_s, is_called_off=True)
                    counts.cancelled += 1
            else:
                counts.discarded += 1
        if released or self.version > old_version:
            members = sorted(released)
            next_serial, version = agenda.next_serial, self.version
            tickets = [_NEW(Ticket, (member, next_serial[member], version)) for member in members]
            steps = [released[member] for member in members]
            agenda.begin(tickets, steps, at_s, is_updated=version > old_version)
