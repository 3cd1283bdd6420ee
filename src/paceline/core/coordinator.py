"""The coordinator of a run: it turns facts, in the order in which they arrive, into orders.

It joins three pure parts, the protocol (who waits, whose work counts), the ledger (where each lease
is) and the membership. Every engine runs this one class, so a prediction, a live run and a replay
make the same decisions.

    fact -> is it legal? -> protocol -> are its decisions legal? -> carried out -> settled -> orders

    settled:  1  pending members that can be served are granted: a ticket, leases, newest version
              2  if nobody is at work and no lease is free, the protocol hears Exhausted; again 1
              3  if every lease is retired or dropped, the epoch ends
              4  fresh leases are reserved for members that fetch ahead

At the end of an epoch pending members get copies of leases at work, if the protocol allows it: the
first push wins, and the coordinator itself cancels the others, which for the protocol still work. A
push whose ticket is not current is late and changes nothing.

A push that weighs nothing (the script did nothing with its mini-batch) is a push for the protocol,
so members stay in step; an Apply with such pushes is split:

    Apply(a, b, c), b weighs nothing  ->  Retire(b), Apply(a, c)      all weigh nothing: no update

A script that leaves its loop early ends the epoch for all: nothing more is handed out, and only
work in flight is finished.

Over 300 lines, in one file: facts, decisions and settling change the same state in one turn, and
must be read together. This module must not know tensors, processes, clocks or the network.
"""

from collections.abc import Sequence
from typing import Any

from ..errors import ProtocolError
from ..events import (
    Apply,
    Cancel,
    Decision,
    Discard,
    EpochEnd,
    Exhausted,
    Fact,
    Grant,
    Joined,
    Late,
    Lease,
    Left,
    Order,
    Pushed,
    Release,
    Retire,
    Stalled,
    Ticket,
)
from ..protocols.base import SyncProtocol
from .batches import Ends, even_share
from .ledger import Ledger
from .membership import Membership, check_decisions
from .rest_state import at_rest, frontier, resting
from .stats import Stats


class Coordinator:
    """Protocol, ledger and membership of one run.

    Invariant: every push ends in exactly one of Apply, Discard and Late. An illegal fact raises
    ProtocolError and changes nothing; an illegal decision is refused before any state changes
    (tests/core/test_legality.py, tests/support/driver.py).
    """

    def __init__(self, protocol: SyncProtocol, ledger: Ledger) -> None:
        self.version = 0
        self.epoch = -1  # that is open, or was open last
        self.is_epoch_open = False
        self.is_cut_off = False  # inside the epoch, waiting for members to go on with it
        self.last_stats = Stats()
        self._protocol = protocol
        self._initial = protocol.state()  # before any fact
        self._ledger = ledger
        self._members = Membership()
        self._weightless: set[Ticket] = set()  # gathered pushes that weigh nothing
        self._outside: set[int] = set()  # members whose script has left this epoch's loop
        self._num_unused = 0  # samples of this epoch that were never handed out

    @property
    def is_between_epochs(self) -> bool:
        """Whether the last epoch is done and the next has not begun."""
        return not (self.is_epoch_open or self.is_cut_off)

    @property
    def live_members(self) -> list[int]:
        """The live members, in order."""
        return sorted(self._members.live)

    def is_at_work(self, member: int) -> bool:
        """Whether this live member has a current ticket."""
        return self._members.is_at_work(member)

    # -- calls of an engine -------------------------------------------------------------------

    def hear(self, fact: Fact) -> list[Order]:
        """Handle a fact; returns the orders that follow, to be carried out in this order."""
        orders: list[Order] = []
        if self._is_news(fact, orders):
            decisions = self._ask(fact)
            self._book(fact, orders)
            # The leases of a stalled member are never dropped: its update needs them.
            self._carry_out(decisions, orders, is_abandoned=not isinstance(fact, Stalled))
            self._settle(fact.at_s, orders)
        return orders

    def open_epoch(self, at_s: float, batch_ends: Ends | None = None) -> list[Order]:
        """Begin the next epoch, or resume one that was cut off; pending members are granted."""
        if self.is_epoch_open:
            raise ProtocolError(f"epoch {self.epoch} has not ended")
        if not self.is_cut_off:
            self._ledger.open(self.epoch + 1, batch_ends)
            self.epoch += 1
            self._num_unused = 0
        self.is_epoch_open, self.is_cut_off = True, False
        self._outside.clear()
        orders: list[Order] = []
        self._settle(at_s, orders)
        return orders

    def first_lease_id(self, position: int) -> int:
        """The id of the first lease of this epoch from ``position`` on; 0: there is none."""
        return self._ledger.first_id(position)

    def begins_at(self, position: int) -> bool:
        """Whether peers, which cut this epoch by themselves, can begin at this position."""
        return self._ledger.begins_at(position)

    def leave_epoch(self, member: int, kept: Sequence[int], at_s: float) -> list[Order]:
        """A script left its loop before the epoch's end: nothing more is handed out in it.

        Args:
            kept: ids of leases at work that count; the member's others end unused.
        """
        if not self.is_epoch_open or member not in self._members.live:
            return []
        orders: list[Order] = []
        ticket = self._members.live[member].ticket
        if ticket is not None:
            self._members.withdraw(member)
            self._call_off(self._ledger.leave(ticket, kept), orders)
        self._outside.add(member)
        self._settle(at_s, orders)
        return orders

    def end_stream(self, epoch: int, end: int, at_s: float) -> list[Order]:
        """Note that the stream of this epoch ends before position ``end``."""
        orders: list[Order] = []
        if self.is_epoch_open and epoch == self.epoch and self._ledger.end is None:
            self._ledger.end_at(end)
            self._settle(at_s, orders)
        return orders

    def done_with(self) -> tuple[int, tuple[int, ...]]:
        """See ``Ledger.done_with``."""
        return self._ledger.done_with()

    def leases_of(self, ticket: Ticket) -> tuple[Lease, ...]:
        """The leases of a current ticket; empty for any other."""
        granted = self._members.ticket_for(ticket)
        return () if granted is None else self._ledger.leases_of(granted)

    def extend(self, ticket: Ticket) -> Lease | None:
        """One more lease on a ticket at work (gradient accumulation); None if none is free.

        None also if the ticket is no longer current: its cancellation is on the way.
        """
        granted = self._members.ticket_for(ticket)
        if granted is None:
            return None
        return self._ledger.extend(granted, self.live_members if self._protocol.is_spmd else ())

    def give_back(self, ticket: Ticket, at_s: float) -> list[Order]:
        """The member skips this work: its leases return or are dropped, and it gets new ones.

        No orders if the ticket is no longer current: its cancellation is on the way.
        """
        orders: list[Order] = []
        if (granted := self._members.ticket_for(ticket)) is not None:
            self._members.withdraw(granted.member)
            # Grant before the leases return, or it would get the same ones again.
            self._grant(granted.member, orders)
            self._ledger.give_up(granted, is_abandoned=True)
            self._settle(at_s, orders)
        return orders

    def set_lookahead(self, member: int, depth: int) -> None:
        """Reserve `depth` leases for this member to prefetch, from its next grant on."""
        self._members.check_known(member)
        if member in self._members.live:
            self._ledger.lookahead.set_depth(member, depth)

    def stop(self, at_s: float) -> list[Order]:
        """End the run here: work in flight and pushes not applied return, all members leave.

        The state can be saved then, and new members can go on from it.
        """
        orders: list[Order] = []
        for pushed in self._ledger.gathered():
            self._discard(Discard(pushed), orders, is_abandoned=False)
        for member in self.live_members:
            if self._members.is_at_work(member):
                self._cancel(Cancel(member), orders, is_abandoned=False)
            self._ledger.forget(member, is_for_good=False)
            self._book(Left(member, at_s), orders)
        self._protocol.load(at_rest(self._protocol, self._initial))
        self._outside.clear()
        if not self.is_epoch_open and not self._ledger.is_done:
            self.is_cut_off = True  # leases that rode on to the next epoch have returned
        return orders

    # -- facts --------------------------------------------------------------------------------

    def _is_news(self, fact: Fact, orders: list[Order]) -> bool:
        """Whether a fact can have consequences. Raises ProtocolError if it cannot be true."""
        members = self._members
        if isinstance(fact, Pushed):
            granted = members.ticket_for(fact.ticket)
            if granted is None:
                self.last_stats.late += 1
                orders.append(Late(fact.ticket))
                return False
            self._check(fact, granted)
            return True
        if isinstance(fact, Joined):
            members.check_new(fact.member)
            return True
        if isinstance(fact, Exhausted):
            raise ProtocolError(f"{fact!r}: only the coordinator itself can find this out")
        members.check_known(fact.member)
        return fact.member in members.live  # else its end was noticed twice

    def _check(self, fact: Pushed, granted: Ticket) -> None:
        """Raise ProtocolError if a push contradicts its ticket."""
        if not granted.version <= fact.ticket.version <= self.version:
            raise ProtocolError(
                f"{fact!r}: the version of a push must be from {granted.version} (granted) to "
                f"{self.version} (newest)"
            )
        if fact.num_samples < 0 or not fact.share >= 0.0 or fact.num_samples < (fact.share > 0.0):
            raise ProtocolError(f"{fact!r}: a push with a weight has at least 1 sample")
        if fact.kept or fact.unused:
            held = {lease.id for lease in self._ledger.leases_of(granted)}
            if len({*fact.kept, *fact.unused}) < len(fact.kept) + len(fact.unused) or (
                not held.issuperset((*fact.kept, *fact.unused))
            ):
                raise ProtocolError(f"{fact!r}: a push can keep or leave only leases that it holds")

    def _book(self, fact: Fact, orders: list[Order]) -> None:
        members = self._members
        if isinstance(fact, Pushed):
            granted = members.end_work(fact.ticket.member)
            assert granted is not None
            if not fact.share:
                self._weightless.add(fact.ticket)
            beaten = self._ledger.gather(
                granted, fact.ticket, kept=fact.kept, unused=fact.unused,
                steps_again=fact.num_samples > 0,
            )  # fmt: skip
            self._call_off(beaten, orders)
        elif isinstance(fact, Joined):
            members.join(fact.member)
            self._ledger.owners = self.live_members
        elif isinstance(fact, Left):
            lost = members.leave(fact.member)
            if lost is not None:
                self._ledger.give_up(lost, is_abandoned=False)
            self._ledger.forget(fact.member, is_for_good=not self.is_epoch_open)
        elif isinstance(fact, Stalled):
            self._ledger.take_back(fact.member)

    def _call_off(self, beaten: Sequence[Ticket], orders: list[Order]) -> None:
        """Cancel tickets with copies of a lease for which another member's push was first."""
        for ticket in beaten:
            self._members.withdraw(ticket.member)
            self._ledger.give_up(ticket, is_abandoned=False)
            self.last_stats.cancelled += 1
            orders.append(Cancel(ticket.member))

    # -- decisions ----------------------------------------------------------------------------

    def _ask(self, fact: Fact) -> list[Decision]:
        decisions = self._protocol.answer(fact, self.version)
        scales = self._protocol.staleness.scales
        is_gathered = self._ledger.is_gathered
        check_decisions(decisions, fact, self._members, is_gathered, is_scaled=scales)
        return decisions

    def _carry_out(
        self, decisions: list[Decision], orders: list[Order], *, is_abandoned: bool = True
    ) -> None:
        for decision in decisions:
            if isinstance(decision, Apply):
                self._apply(decision, orders)
            elif isinstance(decision, Release):
                self._members.pending[decision.member] = decision.num_steps
            elif isinstance(decision, Cancel):
                self._cancel(decision, orders, is_abandoned=is_abandoned)
            else:
                self._discard(decision, orders, is_abandoned=is_abandoned)

    def _apply(self, update: Apply, orders: list[Order]) -> None:
        if self._weightless:
            weighted = self._split(update, orders)
            if weighted is None:
                return
            update = weighted
        staleness_versions = self.last_stats.staleness_versions
        for pushed in update.tickets:
            lag = self.version - pushed.version
            staleness_versions[lag] = staleness_versions.get(lag, 0) + 1
            self._ledger.retire(pushed, self.version + 1)
        self.version += 1
        self.last_stats.updates += 1
        orders.append(update)

    def _split(self, update: Apply, orders: list[Order]) -> Apply | None:
        """The update without pushes that weigh nothing, which are retired; None: no update."""
        weightless = tuple(ticket for ticket in update.tickets if ticket in self._weightless)
        if not weightless:
            return update
        for pushed in weightless:
            self._ledger.retire(pushed, self.version)
        self._weightless.difference_update(weightless)
        orders.append(Retire(weightless))
        pairs = [
            pair
            for pair in zip(update.tickets, update.weights, strict=True)
            if pair[0] not in weightless
        ]
        return Apply(*zip(*pairs, strict=True)) if pairs else None

    def _cancel(self, cancel: Cancel, orders: list[Order], *, is_abandoned: bool) -> None:
        ticket = self._members.end_work(cancel.member)
        if ticket is None:
            del self._members.pending[cancel.member]  # it has no work to abandon yet
            return
        self._ledger.give_up(ticket, is_abandoned=is_abandoned)
        self.last_stats.cancelled += 1
        orders.append(cancel)

    def _discard(self, discard: Discard, orders: list[Order], *, is_abandoned: bool) -> None:
        self._ledger.give_up(discard.ticket, is_abandoned=is_abandoned)
        self._weightless.discard(discard.ticket)
        self.last_stats.discarded += 1
        orders.append(discard)

    # -- settling -----------------------------------------------------------------------------

    def _settle(self, at_s: float, orders: list[Order]) -> None:
        """Do what has become possible; numbers as in the module docstring."""
        if not self.is_epoch_open:
            return
        ledger, members = self._ledger, self._members
        if self._outside:
            self._num_unused += ledger.close()
        self._serve(orders)  # 1
        if not members.num_at_work and not ledger.has_free:  # 2
            if ledger.has_gathered or members.num_waiting:
                fact = Exhausted(at_s)
                self._carry_out(self._ask(fact), orders)
                self._serve(orders)
            if ledger.is_done:  # 3
                self.is_epoch_open = False
                orders.append(EpochEnd(self.epoch, self.version, self._num_unused))
            elif ledger.has_gathered:
                raise ProtocolError(
                    f"{self._protocol} left {ledger.gathered()} unused when exhausted"
                )
        if ledger.lookahead.is_used:  # 4
            protocol = self._protocol
            ledger.look_ahead(
                protocol.long_steps, num_single=protocol.num_short - 1, in_step=protocol.is_spmd
            )  # one of the short rounds is at work
            self._tell_upcoming(orders)

    def _serve(self, orders: list[Order]) -> None:
        pending = self._members.pending
        if not pending:
            return
        ledger, may_copy = self._ledger, self._protocol.copies_in_tail
        if ledger.has_free or ledger.has_again or (may_copy and self._members.num_at_work):
            waiting = sorted(set(pending) - self._outside)
            for place, member in enumerate(waiting):
                self._share_evenly(member, len(waiting) - place)
                is_served = self._grant(member, orders, may_copy=may_copy)
                if not is_served and not ledger.has_again:
                    return

    def _share_evenly(self, member: int, num_waiting: int) -> None:
        """At the end of an epoch, share the remaining steps evenly among those who wait."""
        pending, num_steps = self._members.pending, self._protocol.num_steps
        if num_steps > 1:
            num_free = self._ledger.num_free(num_waiting * num_steps)
            pending[member] = max(1, even_share(num_free, num_waiting, num_steps))

    def _grant(self, member: int, orders: list[Order], *, may_copy: bool = False) -> bool:
        """Grant leases to a pending member; False if there are none."""
        members = self._members
        ticket = Ticket(member, members.live[member].next_serial, self.version)
        leases = self._ledger.hand_out(ticket, members.pending[member])
        if not leases and may_copy:
            leases = self._ledger.hand_out_copy(ticket)
        if not leases:
            return False
        members.begin_work(ticket)
        orders.append(Grant(ticket, leases))
        return True

    def _tell_upcoming(self, orders: list[Order]) -> None:
        for i, order in enumerate(orders):
            if isinstance(order, Grant):
                upcoming = self._ledger.lookahead.news(order.ticket.member)
                orders[i] = order._replace(upcoming=upcoming) if upcoming else order

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The whole state, as JSON; coordinators with equal states go on alike."""
        return {
            "version": self.version,
            "epoch": self.epoch,
            "is_epoch_open": self.is_epoch_open,
            "stats": self.last_stats.state(),
            "weightless": sorted(map(list, self._weightless)),
            "outside": sorted(self._outside),
            "num_unused": self._num_unused,
            "protocol": self._protocol.state(),
            "ledger": self._ledger.state(),
            "members": self._members.state(),
        }

    def resting_state(self) -> dict[str, Any]:
        """The `state()` that a `stop()` would leave, for a checkpoint while the run goes on."""
        state = resting(self.state(), at_rest(self._protocol, self._initial))
        is_over = self.is_between_epochs and not self._ledger.has_riding
        return {**state, "is_epoch_open": not is_over}

    @property
    def has_used_nothing(self) -> bool:
        """Whether this epoch is over or has been left by scripts, with no sample used."""
        is_closed = self.is_between_epochs or bool(self._outside)
        return is_closed and self._ledger.is_unused

    @property
    def has_riding(self) -> bool:
        """Whether samples of this epoch ride on a later push."""
        return self._ledger.has_riding

    def frontier(self) -> int | None:
        """See ``rest_state.frontier``; valid while nobody works."""
        return frontier(self._ledger.state(), self._ledger.every_epoch)

    def resume(self, state: dict[str, Any]) -> None:
        """Restore a resting state; an open epoch goes on with the next `open_epoch`."""
        self.load(state)
        self.is_epoch_open, self.is_cut_off = False, self.is_epoch_open

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state()`; protocol and ledger must have been made with the same sizes."""
        self.version = state["version"]
        self.epoch = state["epoch"]
        self.is_epoch_open = state["is_epoch_open"]
        self.last_stats.load(state["stats"])
        self._weightless = {Ticket(*ticket) for ticket in state["weightless"]}
        self._outside, self._num_unused = set(state["outside"]), state["num_unused"]
        self._protocol.load(state["protocol"])
        self._ledger.load(state["ledger"])
        self._members.load(state["members"])
        self._ledger.owners = self.live_members
