"""An engine without work: it simulates orders, and checks every rule after every fact.

It keeps its own records from the orders alone, to compare the ledger with. A twin, loaded from
JSON at some point, may get the same facts and must give the same answers.
"""

import json
import random
from collections import Counter
from collections.abc import Callable

from ledger_places import LedgerPlace, whereabouts
from paceline.core.coordinator import Coordinator
from paceline.core.ledger import Ledger
from paceline.events import (
    Apply,
    Cancel,
    Discard,
    EpochEnd,
    Fact,
    Grant,
    Joined,
    Late,
    Lease,
    Left,
    Order,
    Pushed,
    Retire,
    Stalled,
    Ticket,
)
from paceline.protocols.base import SyncProtocol


class Driver:
    """Drives one coordinator and checks all its answers."""

    def __init__(
        self,
        make_protocol: Callable[[], SyncProtocol],
        make_ledger: Callable[[], Ledger],
        num_members: int,
    ) -> None:
        self._make = lambda: Coordinator(make_protocol(), make_ledger())
        self.coordinator = self._make()
        self._twin: Coordinator | None = None
        self.may_drop = self.ledger._dropped == "skip"
        self.now_s = 0.0
        self.next_member = 0
        self.log: list[Order] = []
        self.at_work: dict[int, tuple[Ticket, list[Lease]]] = {}
        self.stalled: set[int] = set()
        self.live: set[int] = set()
        self.upcoming: dict[int, list[Lease]] = {}  # told to each member, and not yet handed to it
        self.next_serial: Counter[int] = Counter()
        self.over: list[Ticket] = []  # cancelled or lost; may still be pushed late
        self.gathered: dict[Ticket, tuple[list[Lease], int]] = {}
        self.retired: dict[int, int] = {}  # lease id -> version
        self.riding: dict[int, list[Lease]] = {}  # by member, on its next push
        self.unused: set[int] = set()  # lease ids left unused by scripts in this epoch
        self.outside: set[int] = set()  # members whose script has left this epoch's loop
        self.is_closed = False  # so no more work is handed out in it
        self.used: Counter[int] = Counter()  # position -> updates that used it, this epoch
        self.version = 0  # counted from the updates that were ordered
        self.num_pushed = 0
        self.num_met = 0  # pushes that met their Apply, Discard or Late
        self.is_epoch_open = False
        self.num_epochs_ended = 0
        for _ in range(num_members):
            self.join()

    @property
    def ledger(self) -> Ledger:
        return self.coordinator._ledger

    @property
    def protocol(self) -> SyncProtocol:
        return self.coordinator._protocol

    # -- events -------------------------------------------------------------------------------

    def open_epoch(self) -> None:
        self.used.clear()
        self.retired.clear()
        self.unused.clear()
        self.outside.clear()
        self.is_closed = False
        self.is_epoch_open = True
        self._both(lambda c: c.open_epoch(self.now_s))

    def join(self) -> int:
        member = self.next_member
        self.next_member += 1
        self.live.add(member)
        self._hear(Joined(member, self._tick()))
        return member

    def push(self, member: int, *, is_newest_pulled: bool = False) -> None:
        ticket, leases = self.at_work.pop(member)
        self.stalled.discard(member)
        if is_newest_pulled:
            ticket = ticket._replace(version=self.coordinator.version)
        num_samples = sum(lease.num_samples for lease in leases)
        self.gathered[ticket] = (leases, num_samples)
        self.num_pushed += 1
        self._hear(Pushed(ticket, num_samples, 1.0, True, self._tick()))

    def push_some(self, member: int, rng: random.Random) -> None:
        """A push that uses some of its leases, keeps some, and leaves some unused."""
        ticket, leases = self.at_work.pop(member)
        self.stalled.discard(member)
        fates = [rng.choice(("used", "kept", "unused")) for _ in leases]
        used, kept, unused = (
            [lease for lease, fate in zip(leases, fates, strict=True) if fate == one]
            for one in ("used", "kept", "unused")
        )
        self._push_parts(ticket, used, kept, unused)

    def step_again(self, member: int) -> None:
        """A push of a batch the script steps on again."""
        ticket, leases = self.at_work.pop(member)
        self.stalled.discard(member)
        num_samples = sum(lease.num_samples for lease in leases)
        self.gathered[ticket] = ([], num_samples)
        self.num_pushed += 1
        ids = tuple(lease.id for lease in leases)
        self._hear(Pushed(ticket, num_samples, 1.0, True, self._tick(), None, ids))
        if member in self.at_work:
            assert self.at_work[member][1] == leases

    def _push_parts(
        self, ticket: Ticket, used: list[Lease], kept: list[Lease], unused: list[Lease]
    ) -> None:
        num_samples = sum(lease.num_samples for lease in used)
        self.gathered[ticket] = (used, num_samples)
        self.num_pushed += 1
        self.unused.update(lease.id for lease in unused)
        if kept:
            self.riding[ticket.member] = kept
        ids = (tuple(lease.id for lease in part) for part in (kept, unused))
        self._hear(Pushed(ticket, num_samples, 1.0, True, self._tick(), None, *ids))

    def leave(self, member: int, *, keeps: bool) -> None:
        """The member's script leaves its loop."""
        ticket, leases = self.at_work.pop(member)
        self.over.append(ticket)
        self.stalled.discard(member)
        self.outside.add(member)
        self.is_closed = True
        kept = [lease for lease in leases if keeps]
        if kept:
            self.riding[member] = kept
        others = {lease.id for _, held in self.at_work.values() for lease in held}
        self.unused |= {lease.id for lease in leases if lease not in kept} - others
        ids = tuple(lease.id for lease in kept)
        self._both(lambda c: c.leave_epoch(member, ids, self.now_s))

    def push_late(self, ticket: Ticket) -> None:
        self.over.remove(ticket)
        self.num_pushed += 1
        before = self.coordinator.state()
        assert self._hear(Pushed(ticket, 1, 1.0, True, self._tick())) == [Late(ticket)]
        before["stats"]["late"] += 1
        assert self.coordinator.state() == before, "a late push changed something"

    def crash(self, member: int) -> None:
        self.live.remove(member)
        self.stalled.discard(member)
        self.upcoming.pop(member, None)
        lost = self.riding.pop(member, [])
        if not self.is_epoch_open:
            self.unused.update(lease.id for lease in lost)
        if member in self.at_work:
            self.over.append(self.at_work.pop(member)[0])
        self._hear(Left(member, self._tick()))

    def stall(self, member: int) -> None:
        self.stalled.add(member)
        self._hear(Stalled(member, self._tick()))

    def extend(self, member: int) -> None:
        ticket, leases = self.at_work[member]
        more = self.coordinator.extend(ticket)
        if self._twin is not None:
            assert self._twin.extend(ticket) == more
        if more is not None:
            leases.append(more)
        self._check()

    def give_back(self, member: int) -> None:
        ticket, _ = self.at_work.pop(member)
        self.over.append(ticket)
        self._both(lambda c: c.give_back(ticket, self.now_s))

    def look_ahead(self, member: int, depth: int) -> None:
        self._both(lambda c: [c.set_lookahead(member, depth)][:0])

    def save_and_load(self, *, continue_from_copy: bool) -> None:
        """From now on a coordinator loaded from JSON runs alongside or takes over."""
        copy = self._make()
        copy.load(json.loads(json.dumps(self.coordinator.state())))
        assert copy.state() == self.coordinator.state()
        self._twin = copy
        if continue_from_copy:
            self.coordinator, self._twin = copy, self.coordinator

    def stop(self) -> None:
        self.live.clear()
        self.stalled.clear()
        self.upcoming.clear()
        self.riding.clear()
        self.outside.clear()
        self._both(lambda c: c.stop(self.now_s))
        assert not self.at_work
        assert not self.gathered

    # -- progress -----------------------------------------------------------------------------

    def finish_epoch(self, rng: random.Random) -> None:
        """Without further faults, and with stalled members replaced, the epoch must end."""
        for member in sorted(self.stalled):
            self.crash(member)
        if not self.live - self.outside:
            self.join()
        num_leases = len(self.ledger.cut_all())
        for _ in range(20 + 4 * num_leases * (len(self.live) + 1)):
            if not self.is_epoch_open:
                return
            self.push(rng.choice(sorted(self.at_work)))
        raise AssertionError("the epoch does not end")

    def _tick(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def _hear(self, fact: Fact) -> list[Order]:
        return self._both(lambda c: c.hear(fact))

    def _both(self, say: Callable[[Coordinator], list[Order]]) -> list[Order]:
        orders = say(self.coordinator)
        if self._twin is not None:
            assert say(self._twin) == orders
            assert self._twin.state() == self.coordinator.state()
        for order in orders:
            self._carry_out(order)
        self.log += orders
        self._check()
        return orders

    # -- orders and their rules ---------------------------------------------------------------

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Grant):
            self._carry_out_grant(order)
        elif isinstance(order, Apply):
            self._carry_out_apply(order)
        elif isinstance(order, Cancel):
            assert order.member in self.at_work, "a cancelled member was not at work"
            self.over.append(self.at_work.pop(order.member)[0])
        elif isinstance(order, Discard):
            del self.gathered[order.ticket]
            self.num_met += 1
        elif isinstance(order, Late):
            self.num_met += 1
        elif isinstance(order, Retire):
            for ticket in order.tickets:
                assert self.gathered.pop(ticket)[1] == 0, "a push with a gradient was left out"
            self.num_met += len(order.tickets)
        elif isinstance(order, EpochEnd):
            self._carry_out_epoch_end(order)

    def _carry_out_grant(self, grant: Grant) -> None:
        member = grant.ticket.member
        assert self.is_epoch_open
        assert member in self.live
        assert member not in self.at_work, "a busy member was released"
        assert grant.ticket.serial == self.next_serial[member]
        assert grant.ticket.version == self.version
        riding = self.riding.pop(member, [])
        assert list(grant.leases[: len(riding)]) == riding, "what rides comes first"
        assert len(grant.leases) >= 1
        self.next_serial[member] += 1
        self.at_work[member] = (grant.ticket, list(grant.leases))
        queue = self.upcoming.setdefault(member, [])
        queue += grant.upcoming
        assert [lease.id for lease in queue] == sorted({lease.id for lease in queue})
        for lease in grant.leases:
            if lease in queue:  # batches fetched ahead are used in the order they were fetched
                skipped = queue[: queue.index(lease)]
                kept = self.ledger.lookahead.kept(member)
                assert not set(skipped) & set(kept), "an older lease was left behind"
                del queue[: len(skipped) + 1]

    def _carry_out_apply(self, update: Apply) -> None:
        total = sum(self.gathered[ticket][1] for ticket in update.tickets)
        assert total > 0, "an update of nothing"
        for ticket, weight in zip(update.tickets, update.weights, strict=True):
            leases, num_samples = self.gathered.pop(ticket)
            assert abs(weight - num_samples / total) < 1e-12
            for lease in leases:
                if lease.epoch == self.coordinator.epoch:
                    self.used.update(range(lease.start, lease.stop))
                assert lease.id not in self.retired
                self.retired[lease.id] = self.version + 1
        self.num_met += len(update.tickets)
        self.version += 1

    def _carry_out_epoch_end(self, end: EpochEnd) -> None:
        assert self.is_epoch_open
        assert not self.at_work
        assert not self.gathered
        assert end[:2] == (self.num_epochs_ended, self.version)
        places = {lease: whereabouts(self.ledger, lease).place for lease in self.ledger.cut_all()}
        assert self.may_drop or LedgerPlace.DROPPED not in places.values()
        without = (LedgerPlace.DROPPED, LedgerPlace.UNUSED, LedgerPlace.RIDING)
        dropped = [
            position
            for lease, place in places.items()
            if place in without
            for position in range(lease.start, lease.stop)
        ]
        end_position = self.ledger.cut_all()[-1].stop
        assert Counter(dropped) + self.used == Counter(range(end_position))
        self.is_epoch_open = False
        self.num_epochs_ended += 1

    # -- invariants ---------------------------------------------------------------------------

    def _check(self) -> None:
        assert self.coordinator.version == self.version, "versions are not dense"
        assert self.coordinator.last_stats.updates == self.version
        assert self.num_pushed == self.num_met + len(self.gathered), "a push met nothing, or two"
        assert set(self.ledger.gathered()) == set(self.gathered)
        assert self.coordinator.live_members == sorted(self.live)
        assert self.coordinator.is_epoch_open == self.is_epoch_open
        self._check_leases()
        self._check_that_nobody_idles_in_vain()

    def _check_leases(self) -> None:
        """Each lease is in exactly the place the orders imply."""
        leases = self.ledger.cut_all()
        assert [lease.stop for lease in leases[:-1]] == [lease.start for lease in leases[1:]]
        holders: dict[int, list[int]] = {}
        for member, (_, held) in self.at_work.items():
            for lease in held:
                holders.setdefault(lease.id, []).append(member)
        gathered = {
            lease.id: ticket.member for ticket, (held, _) in self.gathered.items() for lease in held
        }
        for lease in leases:
            result = whereabouts(self.ledger, lease)
            if lease.id in self.retired:
                assert (result.place, result.version) == (
                    LedgerPlace.RETIRED,
                    self.retired[lease.id],
                )
            elif lease.id in self.unused:
                assert result.place is LedgerPlace.UNUSED
            elif lease.id in gathered:
                # The other holders of a copy are cancelled before anything else.
                assert (result.place, result.members) == (
                    LedgerPlace.GATHERED,
                    (gathered[lease.id],),
                )
                assert lease.id not in holders
            elif lease.id in holders:
                assert result.place is LedgerPlace.HELD
                assert sorted(result.members) == sorted(holders[lease.id])
            elif any(lease in kept for kept in self.riding.values()):
                assert result.place is LedgerPlace.RIDING
            else:
                places = {LedgerPlace.FREE, LedgerPlace.RESERVED, LedgerPlace.DROPPED}
                places |= {LedgerPlace.UNUSED} if self.is_closed else set()
                places |= {LedgerPlace.HELD} if self.ledger.has_again else set()
                assert result.place in places
                assert self.may_drop or result.place is not LedgerPlace.DROPPED
                assert self.live.issuperset(result.members)
        assert self.protocol.copies_in_tail or all(len(m) == 1 for m in holders.values())

    def _check_that_nobody_idles_in_vain(self) -> None:
        if not self.is_epoch_open:
            return
        members = self.coordinator._members
        if set(members.pending) - self.outside and not self.ledger.has_again:
            assert not self.ledger.has_free, "a member is idle and a lease is free"
            assert not (self.protocol.copies_in_tail and self.at_work), "nobody copies in the tail"
        assert self.at_work or not self.live - self.stalled, "deadlock: nobody is at work"
