"""Which lease is where: every sample of an epoch is in exactly one place and used exactly once.

A lease walks through these places, and the ledger always knows where it is:

    free --1--> held --2--> gathered --3--> retired
     ^ |         ^ |           |
     | 5         1 4           4            1  handed out with a ticket
     | v         | |           |            2  pushed          3  applied
     | reserved -' |           |            4  given up: returns, or is dropped where asked
     `-------------+-----------'            5  reserved to be fetched ahead, and taken back

Returned leases go out first, lowest position first. In an epoch's tail one lease may be held by
several tickets: copies, of which the first push wins. This module must not know of protocols,
of who is alive, or of time; it never decides who works.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal, TypeAlias

from paceline.batches import Batches, Cuts
from paceline.errors import ConfigError, ProtocolError
from paceline.events import Lease, Ticket
from paceline.lookahead import Lookahead

Dropped: TypeAlias = Literal["requeue", "skip"]

_NOT_YET, _IS_DROPPED = 0, -1  # where else the version stands that retired a lease, from 1 on


class Place(enum.Enum):
    """Where a lease can be."""

    FREE = "free"
    RESERVED = "reserved"
    HELD = "held"
    GATHERED = "gathered"
    RETIRED = "retired"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """What became of a lease: its place, who has it, and the update that used it."""

    place: Place
    members: tuple[int, ...] = ()
    version: int | None = None


class Ledger:
    """The leases of one epoch at a time; see `Batches` for how they are cut.

    Args:
        dropped: what becomes of work that was abandoned: "requeue" hands it out again, "skip"
            leaves it out of this epoch, as the papers do.

    Invariant: each lease is in exactly one place (tests/driver.py, after every fact).
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        parts: int,
        *,
        batch_ends: Sequence[int] | None = None,
        keep_remainder: bool = True,
        dropped: Dropped = "requeue",
    ) -> None:
        if dropped not in ("requeue", "skip"):
            raise ConfigError(f"dropped must be 'requeue' or 'skip', got {dropped!r}")
        self._dropped = dropped
        self.every_epoch = Batches(
            num_samples, batch_size, parts, ends=batch_ends, keep_remainder=keep_remainder
        )
        self.lookahead = Lookahead()
        self._begin(Cuts(self.every_epoch, -1, 0))

    def _begin(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self._fate: list[int] = []  # by lease: the version that retired it, or a mark
        self._returned: list[int] = []  # heap of lease ids
        self._held: dict[int, tuple[Ticket, ...]] = {}  # by lease id, oldest grant first
        self._work: dict[Ticket, tuple[Lease, ...]] = {}  # of tickets at work
        self._pushed: dict[Ticket, tuple[Lease, ...]] = {}  # of gathered pushes

    def open(self, epoch: int, batch_ends: Sequence[int] | None = None) -> None:
        """Begin an epoch. Raises ProtocolError while the last one is not done."""
        if not self.is_done:
            raise ProtocolError(f"epoch {epoch} cannot open: the one before is not done")
        every = self.every_epoch
        batches = every if batch_ends is None else every.with_ends(batch_ends)
        self._begin(Cuts(batches, epoch, self._cuts.next_id))

    # -- the next lease -----------------------------------------------------------------------

    def _next_lease(self, member: int) -> Lease | None:
        """The lease that is `member`'s turn, taken out of its place; None if none is free."""
        ahead = self.lookahead.oldest(member) if self.lookahead else None
        if ahead is not None and not (self._returned and self._returned[0] < ahead.id):
            return self.lookahead.take(member)
        if self._returned:
            return self._cuts.by_id(heappop(self._returned))
        fresh = self._next_fresh_lease()
        return self.lookahead.take_from_any() if fresh is None else fresh

    def _next_fresh_lease(self) -> Lease | None:
        lease = self._cuts.take()
        if lease is not None:
            self._fate.append(_NOT_YET)
        return lease

    # -- the walk of a lease ------------------------------------------------------------------

    def hand_out(self, ticket: Ticket, num_steps: int) -> tuple[Lease, ...]:
        """Give `ticket` up to `num_steps` free leases; empty if none is free."""
        lease = self._next_lease(ticket.member)
        if lease is None:
            return ()
        holder = (ticket,)
        leases: tuple[Lease, ...] = (lease,)
        self._held[lease.id] = holder
        while len(leases) < num_steps and (lease := self._next_lease(ticket.member)) is not None:
            self._held[lease.id] = holder
            leases += (lease,)
        self._work[ticket] = leases
        return leases

    def hand_out_copy(self, ticket: Ticket) -> tuple[Lease, ...]:
        """Give `ticket` a copy of the held lease with fewest holders, then of oldest grant."""
        if not self._held:
            return ()
        lease_id = min(self._held, key=lambda held: len(self._held[held]))  # the first of equals
        self._held[lease_id] += (ticket,)
        leases = (self._cuts.by_id(lease_id),)
        self._work[ticket] = leases
        return leases

    def extend(self, ticket: Ticket) -> Lease | None:
        """Give a ticket at work one more lease; None if none is free."""
        lease = self._next_lease(ticket.member)
        if lease is not None:
            self._held[lease.id] = (ticket,)
            self._work[ticket] += (lease,)
        return lease

    def gather(self, granted: Ticket, pushed: Ticket) -> list[Ticket]:
        """The work of `granted` came in as `pushed`; returns the tickets it beat to a lease."""
        leases = self._work.pop(granted)
        self._pushed[pushed] = leases
        beaten: list[Ticket] = []
        for lease in leases:
            holders = self._held.pop(lease.id)
            if len(holders) > 1:
                beaten += [other for other in holders if other != granted and other not in beaten]
        return beaten

    def retire(self, pushed: Ticket, version: int) -> None:
        """The update that made `version` used this push."""
        for lease in self._pushed.pop(pushed):
            self._fate[self._cuts.index(lease.id)] = version

    def give_up(self, ticket: Ticket, *, is_abandoned: bool) -> None:
        """End a ticket at work, or a gathered push, unused: its leases return.

        What was abandoned (not lost with its member, not beaten) is dropped where asked for.
        """
        ends_as = _IS_DROPPED if is_abandoned and self._dropped == "skip" else _NOT_YET
        if (gathered := self._pushed.pop(ticket, None)) is not None:
            for lease in gathered:
                self._end_hold(lease.id, ends_as)
            return
        for lease in self._work.pop(ticket):
            holders = self._held.get(lease.id, ())
            if holders == (ticket,):
                del self._held[lease.id]
                self._end_hold(lease.id, ends_as)
            elif ticket in holders:  # if it is not, another's push won this lease
                self._held[lease.id] = tuple(other for other in holders if other != ticket)

    def _end_hold(self, lease_id: int, fate: int) -> None:
        if fate == _IS_DROPPED:
            self._fate[self._cuts.index(lease_id)] = fate
        else:
            heappush(self._returned, lease_id)

    def take_back(self, member: int) -> None:
        """Keep nothing more for `member` to fetch ahead."""
        for lease in self.lookahead.forget(member):
            heappush(self._returned, lease.id)

    def look_ahead(self, num_at_once: int) -> None:
        """Keep fresh leases for those that fetch ahead."""
        self.lookahead.top_up(self._next_fresh_lease, num_at_once)

    # -- questions ----------------------------------------------------------------------------

    @property
    def has_free(self) -> bool:
        """Whether somebody could be handed a lease now."""
        return bool(self._returned or self._cuts.has_more or self.lookahead)

    @property
    def has_held(self) -> bool:
        """Whether a ticket is at work."""
        return bool(self._held)

    @property
    def has_gathered(self) -> bool:
        """Whether a push waits for its update."""
        return bool(self._pushed)

    @property
    def is_done(self) -> bool:
        """Whether every lease of the epoch is retired or dropped."""
        return not (self._held or self._pushed or self.has_free)

    def is_gathered(self, ticket: Ticket) -> bool:
        """Whether the push of this ticket waits for its update."""
        return ticket in self._pushed

    def gathered(self) -> list[Ticket]:
        """The pushes that wait for their update, in the order they came."""
        return list(self._pushed)

    def leases_of(self, ticket: Ticket) -> tuple[Lease, ...]:
        """What a ticket at work holds, or a gathered push did; empty for any other."""
        return self._work.get(ticket) or self._pushed.get(ticket, ())

    @property
    def num_batches(self) -> int:
        """Batches an epoch has: the length of the loader."""
        return self._cuts.batches.num_batches

    def cut_all(self) -> list[Lease]:
        """All leases of the epoch in cut order, those to come included; changes nothing."""
        return self._cuts.all()

    def lease_at(self, position: int) -> Lease | None:
        """The lease that holds a position of this epoch; None where none was cut yet."""
        return self._cuts.at(position)

    def whereabouts(self, lease: Lease) -> Whereabouts:
        """What became of a lease of this epoch."""
        index = self._cuts.index(lease.id)
        fate = self._fate[index] if index < len(self._fate) else _NOT_YET
        if fate == _IS_DROPPED:
            return Whereabouts(place=Place.DROPPED)
        if fate != _NOT_YET:
            return Whereabouts(place=Place.RETIRED, version=fate)
        if lease.id in self._held:
            members = tuple(ticket.member for ticket in self._held[lease.id])
            return Whereabouts(place=Place.HELD, members=members)
        for ticket in self._pushed:
            if lease in self._pushed[ticket]:
                return Whereabouts(place=Place.GATHERED, members=(ticket.member,))
        if (owner := self.lookahead.owner(lease)) is not None:
            return Whereabouts(place=Place.RESERVED, members=(owner,))
        return Whereabouts(place=Place.FREE)

    def counts(self) -> dict[Place, int]:
        """How many leases of those cut so far are in each place."""
        counts = dict.fromkeys(Place, 0)
        for lease in self._cuts.leases:
            counts[self.whereabouts(lease).place] += 1
        return counts

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can carry it; equal states are equal ledgers."""
        return {
            "cuts": self._cuts.state(),
            "fate": list(self._fate),
            "num_dropped": self._fate.count(_IS_DROPPED),
            "returned": sorted(self._returned),
            "held": [[lease_id, list(map(list, by))] for lease_id, by in self._held.items()],
            "work": _by_ticket(self._work),
            "pushed": _by_ticket(self._pushed),
            "lookahead": self.lookahead.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become what `state()` described. The sizes given at the construction must be the same."""
        self._begin(Cuts.from_state(state["cuts"], self.every_epoch))
        self._fate, self._returned = list(state["fate"]), list(state["returned"])
        self._held = {lease_id: tuple(Ticket(*t) for t in by) for lease_id, by in state["held"]}
        by_id = self._cuts.by_id
        self._work, self._pushed = (
            {Ticket(*ticket): tuple(map(by_id, ids)) for ticket, ids in state[part]}
            for part in ("work", "pushed")
        )
        self.lookahead.load(state["lookahead"], by_id)


def _by_ticket(leases_of: dict[Ticket, tuple[Lease, ...]]) -> list[list[list[int]]]:
    return [[list(ticket), [lease.id for lease in leases]] for ticket, leases in leases_of.items()]
