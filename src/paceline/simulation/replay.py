"""Recompute a run from its trace: the same coordinator, with the facts in the recorded order.

    record  fact   -> coordinator.hear -> orders      equal to the recorded ones?
            push   -> work.push        -> the loss    equal to the recorded one, bit for bit?
            order  -> must be the next of the orders that are due

    resumed        -> coordinator at rest             as in its checkpoint; new members continue
    scaled         -> a push's scale by distance      equal to the recorded one?

A member that was granted work at one version may have pulled a newer one, which arrived while it
waited; the trace records that with the push (``pulled_versions``). Decisions and gradients are not
copied from the trace but computed again; the first difference ends the replay. This module must not
know tasks, files or terminals.
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
    """The first place, in words, at which the run differs from its record."""


Work = tuple[int, int]
"""The member and serial of a ticket."""


def pulled_versions(records: Iterable[Record]) -> dict[Work, int]:
    """Return the version at which each push was computed."""
    pushed = (record.fact.ticket for record in records if isinstance(record, Handed))
    return {ticket[:2]: ticket.version for ticket in pushed}


class RecordedWork(MemberWork, Protocol):
    """The work of members, with the paths and interruptions of a live run."""

    on_scaled: Callable[[Ticket, float], None]
    """Called with each push that is scaled by its distance, and the scale."""

    def go_by(self, path: str) -> None:
        """Exchange gradients between ``peers`` or through the ``store`` from now on."""

    def rest(self) -> None:
        """Forget pushes that no update contains yet: the run was cut off here."""


class RecordedRun:
    """Replays one run.

    Args:
        coordinator: as it was when the run began.
        work: computes the pushes that count; it is not told of work that was never pushed.
        pulled: the version at which each push was computed; missing work was cancelled.
        lookahead: the number of mini-batches that members fetched ahead.

    Attributes:
        pushes: the number of pushes computed so far.
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
        self._tickets: dict[int, Ticket] = {}
        self._scales: dict[Work, float] = {}
        """The scale of each push that the distance rule scaled, until the trace's is read."""
        work.on_scaled = self._keep_scale
        self._is_stopped = False

    def run(
        self,
        records: Iterable[Record],
        until: int | None = None,
        on_progress: Callable[[int], None] = lambda version: None,
    ) -> None:
        """Replay the run to its end, or until ``until`` updates are made.

        Orders that are missing at the end of a truncated trace are no difference.

        Args:
            on_progress: called after each push with the number of updates made.

        Raises:
            Difference: something differs from its record.
        """
        is_ended = False
        for record in records:
            is_ended = isinstance(record, Ended)
            if isinstance(record, Ordered):
                self._expect(record.order, record.t_s)
                continue
            self._check_nothing_due()
            if until is not None and self.coordinator.version >= until:
                return
            if isinstance(record, Heard):
                self._heard(record.fact)
            elif isinstance(record, Handed):
                self._pushed(record.fact)
                on_progress(self.coordinator.version)
            elif isinstance(record, Scaled):
                self._compare_scale(record)
            elif isinstance(record, Rerouted):
                self._work.go_by(record.path)
            elif isinstance(record, Resumed):
                self._resume()
            elif isinstance(record, StopRecord):
                self.coordinator.stop(record.t_s)
                self._is_stopped = True
        if is_ended:
            self._check_nothing_due()

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
            if ticket != self._tickets[ticket.member] or ticket.version > self.coordinator.version:
                raise self._differs(ticket, "a gradient", "no such version")
            del self._tickets[ticket.member]
            leases = self._leases.pop(ticket[:2])
            self._compare(fact, self._work.push(ticket, leases, fact.at_s))
        orders = self.coordinator.hear(fact)
        assert counts or Late(ticket) in orders  # every push in an update was compared
        self._follow(orders, fact)

    def _resume(self) -> None:
        """Resume where the run was cut off: its members are gone, others will join."""
        for member in list(self._tickets):
            self._call_off(member)
        self.coordinator.resume(self.coordinator.resting_state())
        self._work.rest()
        self._is_stopped = False

    def _is_current(self, ticket: Ticket) -> bool:
        at_work = self._tickets.get(ticket.member)
        return at_work is not None and at_work[:2] == ticket[:2] and not self._is_stopped

    def _compare(self, recorded: Pushed, computed: Pushed) -> None:
        if recorded.num_samples != computed.num_samples:
            raise self._differs(
                recorded.ticket, f"{recorded.num_samples} samples", str(computed.num_samples)
            )
        if recorded.is_finite != computed.is_finite:
            phrases = {True: "a finite gradient", False: "one that is not"}
            raise self._differs(
                recorded.ticket, phrases[recorded.is_finite], phrases[computed.is_finite]
            )
        if recorded.loss != computed.loss and recorded.loss == recorded.loss and computed.is_finite:
            raise self._differs(recorded.ticket, f"loss {recorded.loss!r}", repr(computed.loss))

    def _keep_scale(self, ticket: Ticket, scale: float) -> None:
        self._scales[ticket[:2]] = scale

    def _compare_scale(self, record: Scaled) -> None:
        """Compare a recorded scale, which its member reports with its next message.

        Pushes of other members may be between the push and this record.
        """
        ticket = record.ticket
        scale = self._scales.pop(ticket[:2], record.scale)
        if scale != record.scale:
            raise Difference(
                f"by push {self.pushes}: distance left {record.scale!r} of the push of member "
                f"{ticket.member} at version {ticket.version}, now {scale!r}"
            )

    def _differs(self, ticket: Ticket, recorded: str, now: str) -> Difference:
        return Difference(
            f"push {self.pushes} (member {ticket.member}, of version {ticket.version}, when the "
            f"newest was {self.coordinator.version}): {recorded} recorded, {now} now"
        )

    # -- orders ---------------------------------------------------------------------------------

    def _follow(self, orders: list[Order], fact: Fact) -> None:
        """Carry out the coordinator's orders, which the trace must record next."""
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
        """Grant work with the version that the member will have pulled when it pushes."""
        ticket = grant.ticket
        version = self._pulled.get(ticket[:2], ticket.version)
        if version < ticket.version:
            raise Difference(
                f"member {ticket.member} pushed a gradient of version {version} for work that was "
                f"granted at version {ticket.version}"
            )
        pulled_grant = grant._replace(ticket=ticket._replace(version=version))
        self._tickets[ticket.member] = pulled_grant.ticket
        self._leases[ticket[:2]] = grant.leases
        if ticket[:2] in self._pulled:
            self._to_pull[version].append(pulled_grant)

    def _call_off(self, member: int) -> None:
        ticket = self._tickets.pop(member, None)
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
            stream_ends = self._work.opened(self.coordinator.epoch + 1) if is_new else None
            self._follow(self.coordinator.open_epoch(at_s, stream_ends), Joined(-1, at_s))
        order = self._due.popleft() if self._due else None
        if order != recorded:
            decided = "nothing" if order is None else _describe(order)
            raise Difference(
                f"after push {self.pushes}, at version {self.coordinator.version}: "
                f"the run decided {_describe(recorded)}; the replay decided {decided}"
            )

    def _check_nothing_due(self) -> None:
        if self._due:
            raise Difference(
                f"after push {self.pushes}, at version {self.coordinator.version}: the replay "
                f"decided {_describe(self._due[0])}; the run decided nothing"
            )


def _describe(order: Order) -> str:
    """Describe an order in a few words."""
    if isinstance(order, EpochEnd):
        return f"the end of epoch {order.epoch}"
    if isinstance(order, Grant):
        ranges = ", ".join(f"{lease.start}-{lease.stop}" for lease in order.leases)
        return f"work for member {order.ticket.member} (samples {ranges})"
    if isinstance(order, Cancel):
        return f"the cancellation of member {order.member}"
    name = type(order).__name__.lower()
    tickets = getattr(order, "tickets", None)
    if tickets is None:
        tickets = (order.ticket,)  # type: ignore[union-attr]  # all others have one
    return f"{name} of {[tuple(ticket) for ticket in tickets]}"
