"""The simulated engine: the coordinator of a live run in virtual time, with its ledger and trace.

    agenda -> push arrives -> work done -> coordinator.hear -> orders -> trace, work, agenda

The same facts go to the same coordinator as in a live run, so the report and the replay read its
trace like any other. A `MemberWork` decides what a push contains: nothing (`Nothing`), or a
gradient at exactly the parameters that its member holds (simulation/training.py). An epoch opens
when the previous one ends, or after the measured pause. Without a trace and gradients,
simulation/timing.py makes the same decisions faster. This module must not know tensors.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from ..conditions.world import Conditions
from ..core.coordinator import Coordinator
from ..core.ledger import Ledger
from ..core.stats import Counts
from ..events import (
    Apply,
    Cancel,
    Discard,
    EpochEnd,
    Fact,
    Grant,
    Joined,
    Lease,
    Left,
    Order,
    Pushed,
    Ticket,
)
from ..protocols.base import SyncProtocol
from ..trace import Trace
from .agenda import NOBODY, Agenda, AgendaChange, EpochStart, Strike

ENDLESS = 1 << 60
"""The samples of an epoch that never ends."""


class MemberWork(Protocol):
    """The work that members do."""

    def opened(self, epoch: int) -> Sequence[int] | None:
        """Hear that an epoch opens; return the ends of its batches if the user defines them."""

    def granted(self, grant: Grant) -> None:
        """Hear that a member begins work with the newest parameters."""

    def push(self, ticket: Ticket, leases: Sequence[Lease], at_s: float) -> Pushed:
        """Finish a member's work, and return what it pushes."""

    def carry_out(self, orders: Sequence[Order], fact: Fact) -> None:
        """Make the updates that follow from a fact."""

    def dropped(self, ticket: Ticket) -> None:
        """Hear that work in flight is called off, or that its member is gone."""


class Nothing:
    """Work that computes nothing: members only take time."""

    def opened(self, epoch: int) -> Sequence[int] | None:
        return None

    def granted(self, grant: Grant) -> None:
        pass

    def push(self, ticket: Ticket, leases: Sequence[Lease], at_s: float) -> Pushed:
        num_samples = sum(lease.num_samples for lease in leases)
        return Pushed(ticket, num_samples, math.nan, True, at_s)

    def carry_out(self, orders: Sequence[Order], fact: Fact) -> None:
        pass

    def dropped(self, ticket: Ticket) -> None:
        pass


class SimulatedRun:
    """One run in virtual time.

    Args:
        ledger: of the data; `endless_ledger` if there is none.
        work: that members do; `Nothing` by default.
        trace: records everything, if given.
        hear_epoch: called at the end of each epoch with its number and the time; returns whether
            to go on.

    Attributes:
        counts: of the run so far.
        ending: why the run ended; empty while it goes on.
    """

    def __init__(
        self,
        protocol: SyncProtocol,
        ledger: Ledger,
        conditions: Conditions,
        *,
        work: MemberWork | None = None,
        trace: Trace | None = None,
        hear_epoch: Callable[[int, float], bool] = lambda epoch, at_s: True,
    ) -> None:
        self.counts = Counts()
        self.coordinator = Coordinator(protocol, ledger)
        self.ending = ""
        self._conditions = conditions
        self._work: MemberWork = Nothing() if work is None else work
        self._trace = trace
        self._hear_epoch = hear_epoch
        self._agenda = Agenda(conditions, protocol.streaming.overlap_steps)
        self._leases: dict[Ticket, tuple[Lease, ...]] = {}
        self._granted_s: dict[Ticket, float] = {}
        self._ended_s: dict[int, float] = {}
        self._now_s = 0.0

    def run(
        self, num_updates: int | None, on_progress: Callable[[int], None] = lambda done: None
    ) -> Counts:
        """Go on until ``num_updates`` are made in all, or ``hear_epoch`` says to stop.

        Args:
            on_progress: called after each event with the number of updates made.
        """
        if self.coordinator.epoch < 0:
            self._open(0.0)
        self.ending, last_version = "", math.inf if num_updates is None else num_updates
        while not self.ending:
            if self.coordinator.version >= last_version:
                self.ending = f"{num_updates} updates are done"
                break
            at_s, event = self._agenda.next()
            self._now_s = at_s
            if type(event) is AgendaChange:
                self._changed(event, at_s)
            elif type(event) is Ticket:
                self._pushed(event, at_s)
            elif type(event) is EpochStart:
                self._open(at_s)
            else:
                assert type(event) is Strike
                self._struck(event.event, at_s)
            on_progress(self.coordinator.version)
        self.counts.there_s = self._agenda.seconds_there(self._now_s)
        return self.counts

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def stop(self, reason: str) -> None:
        """End the run after the current event; may be called from ``on_progress``."""
        self.ending = reason

    def close(self) -> None:
        """End the trace."""
        if self._trace is not None:
            self._trace.end(self._now_s, self.ending)

    # -- facts ----------------------------------------------------------------------------------

    def _open(self, at_s: float) -> None:
        ends = self._work.opened(self.coordinator.epoch + 1)
        self._carry_out(self.coordinator.open_epoch(at_s, ends), Joined(-1, at_s))

    def _struck(self, event: object, at_s: float) -> None:
        """Handle a fault; only tests/support/faulty_run.py enters any."""
        raise AssertionError(event)

    def _changed(self, change: AgendaChange, at_s: float, reason: str = "away") -> None:
        """Handle a worker that comes or goes."""
        agenda, trace = self._agenda, self._trace
        if change.is_there:
            member = agenda.join(change.worker, at_s)
            self._ended_s[member] = at_s
            fact: Fact = Joined(member, at_s)
            if trace is not None:
                trace.joined(at_s, member, change.worker, 0)
        else:
            member = agenda.leave(change.worker, at_s)
            if agenda.current[member] is not None:
                self._call_off(member, at_s)
                self.counts.lost += 1
            fact = Left(member, at_s)
            if trace is not None:
                trace.left(at_s, member, reason)
        self._carry_out(self.coordinator.hear(fact), fact)

    def _pushed(self, ticket: Ticket, at_s: float) -> None:
        member = ticket.member
        computed_s = self._agenda.end(member, at_s)
        granted_s = self._granted_s.pop(ticket)
        fact = self._work.push(ticket, self._leases.pop(ticket), at_s)
        if self._trace is not None:
            waited_s = granted_s - self._ended_s[member]
            pushed_s = max(0.0, at_s - granted_s - computed_s)  # it may have begun before
            self._trace.pushed(fact, computed_s, waited_s, pushed_s)
        self._ended_s[member] = at_s
        orders = self.coordinator.hear(fact)
        if Discard(ticket) in orders:
            self.counts.wasted_s += computed_s
            self._agenda.refuse()
        else:
            self.counts.used_s += computed_s
        self._carry_out(orders, fact)

    # -- orders ---------------------------------------------------------------------------------

    def _carry_out(self, orders: Sequence[Order], fact: Fact) -> None:
        at_s, counts, trace = fact.at_s, self.counts, self._trace
        old_version = self.coordinator.version - sum(type(order) is Apply for order in orders)
        version = old_version
        grants: list[Grant] = []
        for order in orders:
            if trace is not None:
                trace.order(order, at_s)
            if isinstance(order, Grant):
                grants.append(order)
            elif isinstance(order, Apply):
                counts.applied(order.tickets, version, at_s)
                version += 1
            elif isinstance(order, Cancel):
                self._call_off(order.member, at_s)
                counts.cancelled += 1
            elif isinstance(order, Discard):
                counts.discarded += 1
        self._work.carry_out(orders, fact)  # after work that is called off has freed its version
        self._grant(grants, at_s, is_updated=version > old_version)
        for order in orders:
            if isinstance(order, EpochEnd):
                self._ended(order, at_s)

    def _grant(self, grants: Sequence[Grant], at_s: float, *, is_updated: bool) -> None:
        for grant in grants:
            self._leases[grant.ticket] = grant.leases
            self._granted_s[grant.ticket] = at_s
            self._work.granted(grant)
        tickets = [grant.ticket for grant in grants]
        steps = [len(grant.leases) for grant in grants]
        self._agenda.begin(tickets, steps, at_s, is_updated=is_updated)

    def _call_off(self, member: int, at_s: float) -> None:
        ticket = self._agenda.current[member]
        assert ticket is not None
        wasted_s = self._agenda.end(member, at_s, is_called_off=True)
        self.counts.wasted_s += wasted_s
        del self._leases[ticket], self._granted_s[ticket]
        self._ended_s[member] = at_s
        self._work.dropped(ticket)
        if self._trace is not None:
            self._trace.superseded(at_s, member, ticket.serial, wasted_s, 0.0)

    def _ended(self, end: EpochEnd, at_s: float) -> None:
        if not self._hear_epoch(end.epoch, at_s):
            self.ending = "finished"
            return
        machine = self._conditions.machine
        pause_s = 0.0 if machine is None else machine.pause_s
        self.counts.paused(pause_s)
        if pause_s:  # a worker may come or go meanwhile
            self._agenda.enter(at_s + pause_s, EpochStart(NOBODY))
        else:
            self._open(at_s)


def endless_ledger(protocol: SyncProtocol) -> Ledger:
    """Return a ledger of mini-batches of one sample, without end."""
    return Ledger(ENDLESS, protocol.num_pushes, protocol.num_pushes)
