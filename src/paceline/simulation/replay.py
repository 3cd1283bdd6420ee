"""A run made again from its trace: the same coordinator, facts in the recorded order.

    record  fact   -> coordinator.hear -> orders      are they the recorded ones?
            push   -> work.push       -> the loss    is it the recorded one, bit for bit?
            order  -> the next of those that must come

    resumed        -> coordinator at rest             as its checkpoint held it; others go on
    scaled         -> what distance left of a push    is it the recorded one?

A member that was granted work at one version may have pulled a newer one, which came while it
waited; the trace tells with its push (``pulled_versions``). Decisions are not copied from the
trace, they are made again, and so are gradients; what differs first is named and ends the replay.
This module must not know tasks, files or terminals.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ..core.coordinator import Coordinator
from ..events import Cancel, EpochEnd, Fact, Grant, Joined, Late, Lease, Left, Order, Pushed, Ticket
from ..trace.records import (
    Ended,
    Handed,
    Heard,
    Ordered,
    Record,
    Rerouted,
    Resumed,
    Scaled,
    StopRecord,
)
from .engine import MemberWork


class Difference(Exception):
    """What was recorded and what happens now are not the same: the first place, in words."""


Work = tuple[int, int]
"""Member and serial of a ticket."""


def pulled_versions(records: Iterable[Record]) -> dict[Work, int]:
    """The version at which each push was computed."""
    pushed = (one.fact.ticket for one in records if isinstance(one, Handed))
    return {ticket[:2]: ticket.version for ticket in pushed}


class RecordedWork(MemberWork, Protocol):
    """What members do at their work, as a live run does it."""

    on_scaled: Callable[[Ticket, float], None]
    """Hears what distance left of a push."""

    def go_by(self, path: str) -> None:
        """From here on gradients go between ``peers``, or through the ``store``."""

    def rest(self) -> None:
        """The run was cut off here: what was pushed and is in no update is forgotten."""


class RecordedRun:
    """One run, made again.

    Args:
        pulled: the version at which each push was computed; work without one was called off.
        work: computes the pushes that count; it never hears of work that nobody pushed.
        lookahead: mini-batches that members fetched ahead.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        work: RecordedWork,
        pulled: Mapping[Work, int],
        lookahead: int = 0,
    ) -> None:
        self.coordinator = coordinator
        self.pushes = 0
        self._work = work
        self._lookahead = lookahead
        self._pulled = pulled
        self._to_pull: defaultdict[int, list[Grant]] = defaultdict(list)
        self._due: deque[Order] = deque()
        self._leases: dict[Work, tuple[Lease, ...]] = {}
        self._at_work: dict[int, Ticket] = {}
        self._scales: dict[Work, float] = {}
        """What distance left of a push, until the trace tells what it left then."""
        work.on_scaled = self._scaled_now
        self._is_stopped = False

    def run(
        self,
        records: Iterable[Record],
        until: int | None = None,
        on_progress: Callable[[int], None] = lambda version: None,
    ) -> None:
        """Make it again, to its end or until ``until`` updates are made.

        What a trace that was cut off does not say any more is no difference.

        Raises:
            Difference: something is not as it was recorded.
        """
        is_ended = False
        for record in records:
            is_ended = isinstance(record, Ended)
            if isinstance(record, Ordered):
                self._expect(record.order, record.t_s)
                continue
            self._nothing_is_due()
            if until is not None and self.coordinator.version >= until:
                return
            if isinstance(record, Heard):
                self._heard(record.fact)
            elif isinstance(record, Handed):
                self._pushed(record.fact)
                on_progress(self.coordinator.version)
            elif isinstance(record, Scaled):
                self._scaled_then(record)
            elif isinstance(record, Rerouted):
                self._work.go_by(record.path)
            elif isinstance(record, Resumed):
                self._go_on()
            elif isinstance(record, StopRecord):
                self.coordinator.stop(record.t_s)
                self._is_stopped = True
        if is_ended:
            self._nothing_is_due()

    # -- facts ----------------------------------------------------------------------------------

    def _heard(self, fact: Fact) -> None:
        if isinstance(fact, Left):
            self._call_off(fact.member)
        self._follow(self.coordinator.hear(fact), fact)
        if isinstance(fact, Joined) and self._lookahead:
            self.coordinator.set_lookahead(fact.member, self._lookahead)

    def _pushed(self, fact: Pushed) -> None:
        """Compute a push again, unless it came too late to count."""
        self.pushes += 1
        ticket = fact.ticket
        if counts := self._is_current(ticket):
            if ticket != self._at_work[ticket.member] or ticket.version > self.coordinator.version:
                raise self._differs(ticket, "a gradient", "it holds no such version")
            del self._at_work[ticket.member]
            leases = self._leases.pop(ticket[:2])
            self._compare(fact, self._work.push(ticket, leases, fact.at_s))
        orders = self.coordinator.hear(fact)
        assert counts or Late(ticket) in orders  # nothing that is used goes unseen
        self._follow(orders, fact)

    def _go_on(self) -> None:
        """The run was cut off at this border; who was at work is gone, others will join."""
        for member in list(self._at_work):
            self._call_off(member)
        self.coordinator.resume(self.coordinator.resting_state())
        self._work.rest()
        self._is_stopped = False

    def _is_current(self, ticket: Ticket) -> bool:
        at_work = self._at_work.get(ticket.member)
        return at_work is not None and at_work[:2] == ticket[:2] and not self._is_stopped

    def _compare(self, was: Pushed, now: Pushed) -> None:
        if was.num_samples != now.num_samples:
            raise self._differs(was.ticket, f"{was.num_samples} samples", str(now.num_samples))
        if was.is_finite != now.is_finite:
            words = {True: "a finite gradient", False: "one that is not"}
            raise self._differs(was.ticket, words[was.is_finite], words[now.is_finite])
        if was.loss != now.loss and was.loss == was.loss and now.is_finite:
            raise self._differs(was.ticket, f"loss {was.loss!r}", repr(now.loss))

    def _scaled_now(self, ticket: Ticket, scale: float) -> None:
        self._scales[ticket[:2]] = scale

    def _scaled_then(self, record: Scaled) -> None:
        """It is told with its member's next message, so pushes of others may lie between."""
        ticket = record.ticket
        now = self._scales.pop(ticket[:2], record.scale)
        if now != record.scale:
            raise Difference(
                f"by push {self.pushes}: distance left {record.scale!r} of the push of member "
                f"{ticket.member} at version {ticket.version}, now {now!r}"
            )

    def _differs(self, ticket: Ticket, was: str, now: str) -> Difference:
        return Difference(
            f"push {self.pushes} (member {ticket.member}, of version {ticket.version}, when the "
            f"newest was {self.coordinator.version}): {was} recorded, {now} now"
        )

    # -- orders ---------------------------------------------------------------------------------

    def _follow(self, orders: list[Order], fact: Fact) -> None:
        """Carry out what the coordinator says now; the trace must say the same next."""
        self._due.extend(orders)
        for order in orders:
            if isinstance(order, Cancel):
                self._call_off(order.member)
        if not any(isinstance(order, Late) for order in orders):
            self._work.carry_out(orders, fact)
        for order in orders:
            if isinstance(order, Grant):
                self._grant(order)
        for grant in self._to_pull.pop(self.coordinator.version, ()):
            self._work.granted(grant)

    def _grant(self, grant: Grant) -> None:
        """Work with the version that the member will have pulled when it pushes."""
        ticket = grant.ticket
        version = self._pulled.get(ticket[:2], ticket.version)
        if version < ticket.version:
            raise Difference(
                f"member {ticket.member} pushed a gradient of version {version} for work that it "
                f"was given at version {ticket.version}"
            )
        held = grant._replace(ticket=ticket._replace(version=version))
        self._at_work[ticket.member] = held.ticket
        self._leases[ticket[:2]] = grant.leases
        if ticket[:2] in self._pulled:
            self._to_pull[version].append(held)

    def _call_off(self, member: int) -> None:
        ticket = self._at_work.pop(member, None)
        if ticket is None:
            return
        del self._leases[ticket[:2]]
        if ticket[:2] not in self._pulled:
            return
        waiting = self._to_pull.get(ticket.version, [])
        if any(grant.ticket == ticket for grant in waiting):  # that version was never made
            waiting[:] = [grant for grant in waiting if grant.ticket != ticket]
        else:
            self._work.dropped(ticket)

    def _expect(self, recorded: Order, at_s: float) -> None:
        if not self._due and not self.coordinator.is_epoch_open and not self._is_stopped:
            is_new = self.coordinator.is_between_epochs
            ends = self._work.opened(self.coordinator.epoch + 1) if is_new else None
            self._follow(self.coordinator.open_epoch(at_s, ends), Joined(-1, at_s))
        now = self._due.popleft() if self._due else None
        if now != recorded:
            said = "nothing" if now is None else _say(now)
            raise Difference(
                f"after push {self.pushes}, at version {self.coordinator.version}: "
                f"{_say(recorded)} was decided, now it is {said}"
            )

    def _nothing_is_due(self) -> None:
        if self._due:
            raise Difference(
                f"after push {self.pushes}, at version {self.coordinator.version}: now "
                f"{_say(self._due[0])} is decided, nothing was then"
            )


def _say(order: Order) -> str:
    """An order in a few words."""
    if isinstance(order, EpochEnd):
        return f"the end of epoch {order.epoch}"
    if isinstance(order, Grant):
        ranges = ", ".join(f"{lease.start}-{lease.stop}" for lease in order.leases)
        return f"work for member {order.ticket.member} (samples {ranges})"
    if isinstance(order, Cancel):
        return f"calling off member {order.member}"
    name = type(order).__name__.lower()
    tickets = getattr(order, "tickets", None) or (order.ticket,)  # type: ignore[union-attr]  # all others have one
    return f"{name} of {[tuple(ticket) for ticket in tickets]}"
