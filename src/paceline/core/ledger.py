"""Where each lease is: every sample of an epoch is in exactly one place and used exactly once.

A lease moves through these places:

    free --1--> held --2--> gathered --3--> retired       1  handed out with a ticket
     ^ |         ^ |           |                          2  pushed
     | 5         1 4           4                          3  applied
     | v         | |           |                          4  given up: returns, or is dropped
     | reserved -' |           |                             with dropped="skip"
     `-------------+-----------'                          5  reserved for prefetching; taken back

    held --6--> riding --> held, returned                 6  pushed, and carried by a later push
    held --7--> unused                                    7  pushed without a contribution

Returned leases go out first, lowest position first. At the end of an epoch one lease may be held by
several tickets: copies, of which the first push wins. A riding lease does not delay its epoch: it
may be in an update of the next one.

Over 300 lines, in one file: that a lease is in one place can only be checked where all places are.
This module must not know protocols, which members are alive, or time; it never decides who works.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Literal, TypeAlias

from ..errors import ConfigError, ProtocolError
from ..events import Lease, Ticket
from ..passes import is_far
from .batches import Batches, Ends
from .cuts import Cuts
from .prefetch import Lookahead

Dropped: TypeAlias = Literal["requeue", "skip"]

# Fates of leases other than the version that retired them, which is >= 1.
_NOT_YET, _IS_DROPPED, _IS_UNUSED = 0, -1, -2


class Ledger:
    """The leases of one epoch at a time; see `Batches` for how they are cut.

    Args:
        dropped: what happens to abandoned work: "requeue" hands it out again, "skip" leaves it
            out of this epoch, as the papers do.
        is_sticky: part j of every batch belongs to the j-th member.

    Invariant: each lease is in exactly one place (tests/support/driver.py, after every fact).
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
        is_sticky: bool = False,
    ) -> None:
        if dropped not in ("requeue", "skip"):
            raise ConfigError(f"dropped must be 'requeue' or 'skip', got {dropped!r}")
        self._dropped = dropped
        self.every_epoch = Batches(
            num_samples, batch_size, parts, ends=batch_ends, keep_remainder=keep_remainder,
            has_columns=is_sticky,
        )  # fmt: skip
        self.is_sticky = is_sticky
        self.owners: Sequence[int] = ()  # of the parts of a batch: members, in order
        self.lookahead = Lookahead()
        self._again: dict[int, tuple[Lease, ...]] = {}  # by member, to be granted again
        self._riding: dict[int, tuple[Lease, ...]] = {}  # by member, on its next push
        self._begin(Cuts(self.every_epoch, -1, 0))

    def _begin(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self._fate: list[int] = []  # by lease: the version that retired it, or a mark
        self._num_done = 0  # leading leases that have one, as of the last ``done_with``
        self._returned: list[int] = []  # heap of lease ids
        self._held: dict[int, tuple[Ticket, ...]] = {}  # by lease id, oldest grant first
        self._work: dict[Ticket, tuple[Lease, ...]] = {}  # of tickets at work
        self._pushed: dict[Ticket, tuple[Lease, ...]] = {}  # of gathered pushes

    def open(self, epoch: int, batch_ends: Ends | None = None) -> None:
        """Begin an epoch. Raises ProtocolError while the last one is not done."""
        if not self.is_done:
            raise ProtocolError(f"epoch {epoch} cannot open: the one before is not done")
        every = self.every_epoch
        batches = every if batch_ends is None else every.with_ends(batch_ends)
        self._begin(Cuts(batches, epoch, self._cuts.next_id))

    # -- the next lease -----------------------------------------------------------------------

    def _next_lease(self, member: int) -> Lease | None:
        """Take the next lease for `member`; None if none is free."""
        if self.is_sticky:
            return self._next_of_part(member)
        ahead = self.lookahead.oldest(member) if self.lookahead else None
        if ahead is not None and not (self._returned and self._returned[0] < ahead.id):
            return self.lookahead.take(member)
        if self._returned:
            return self._cuts.by_id(heappop(self._returned))
        fresh = self._next_fresh_lease()
        return self.lookahead.take_from_any() if fresh is None else fresh

    def _next_of_part(self, member: int) -> Lease | None:
        """The same if each member keeps its part: a batch is dealt out to all of them."""
        part, batches = self.owners.index(member), self._cuts.batches
        own = [
            lease_id
            for lease_id in self._returned
            if batches.part_at(self._cuts.by_id(lease_id).start) == part
        ]
        if not own and self.lookahead.oldest(member) is None:
            self.lookahead.keep_for_all(self.owners, self._next_fresh_lease)
        ahead = self.lookahead.oldest(member)
        if own and (ahead is None or min(own) < ahead.id):
            self._returned.remove(min(own))
            heapify(self._returned)
            return self._cuts.by_id(min(own))
        return None if ahead is None else self.lookahead.take(member)

    def _next_fresh_lease(self) -> Lease | None:
        lease = self._cuts.take()
        if lease is not None:
            self._fate.append(_NOT_YET)
        return lease

    # -- moves of a lease ---------------------------------------------------------------------

    def hand_out(self, ticket: Ticket, num_steps: int) -> tuple[Lease, ...]:
        """Give `ticket` up to `num_steps` free leases; empty if none is free.

        Leases that ride on the member's next push come first, and do not count.
        """
        if self._again and (again := self._again.pop(ticket.member, None)) is not None:
            return self._hold(ticket, again)
        lease = self._next_lease(ticket.member)
        if lease is None:
            return ()
        holder = (ticket,)
        leases: tuple[Lease, ...] = (lease,)
        self._held[lease.id] = holder
        while len(leases) < num_steps and (lease := self._next_lease(ticket.member)) is not None:
            self._held[lease.id] = holder
            leases += (lease,)
        return self._give(ticket, leases)

    def _give(self, ticket: Ticket, leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        """Assign leases to a ticket, after those that ride on its push."""
        if self._riding and (riding := self._riding.pop(ticket.member, None)) is not None:
            leases = self._hold(ticket, riding) + leases
        self._work[ticket] = leases
        return leases

    def _hold(self, ticket: Ticket, leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        for lease in leases:
            if self._is_of_this_epoch(lease):
                self._held[lease.id] = (ticket,)
        self._work[ticket] = leases
        return leases

    def _is_of_this_epoch(self, lease: Lease) -> bool:
        """Whether its fate is recorded here: a riding lease may be of an earlier epoch."""
        return self._cuts.index(lease.id) >= 0

    def hand_out_copy(self, ticket: Ticket) -> tuple[Lease, ...]:
        """Give `ticket` a copy of the held lease with fewest holders; among equals the oldest."""
        held = [lease_id for lease_id in self._held if not self._is_nothing(lease_id)]
        if not held:
            return ()
        lease_id = min(held, key=lambda lease_id: len(self._held[lease_id]))  # first of equals
        self._held[lease_id] += (ticket,)
        return self._give(ticket, (self._cuts.by_id(lease_id),))

    def extend(self, ticket: Ticket, in_step_with: Sequence[int] = ()) -> Lease | None:
        """Give a ticket at work one more lease; None if none is free.

        Args:
            in_step_with: members that take fresh leases in turns: whoever asks first, each gets
                the lease that it would get if all asked in member order.
        """
        if in_step_with and not self._returned and self.lookahead.oldest(ticket.member) is None:
            self.lookahead.keep_for_all(in_step_with, self._next_fresh_lease)
            if self.lookahead.oldest(ticket.member) is None:
                return None
        lease = self._next_lease(ticket.member)
        if lease is not None:
            self._held[lease.id] = (ticket,)
            self._work[ticket] += (lease,)
        return lease

    def gather(
        self,
        granted: Ticket,
        pushed: Ticket,
        *,
        kept: Sequence[int] = (),
        unused: Sequence[int] = (),
        steps_again: bool = False,
    ) -> list[Ticket]:
        """Record that the work of `granted` was pushed as `pushed`.

        Args:
            kept: ids of leases that stay with the member: they ride on its next push.
            unused: ids of leases without a contribution.
            steps_again: if all are kept, the member is granted the same ones again.

        Returns:
            Tickets that held copies of these leases, and lost to this push.
        """
        leases = self._work.pop(granted)
        beaten: list[Ticket] = []
        for lease in leases:
            holders = self._held.pop(lease.id, ())
            if len(holders) > 1:
                beaten += [
                    holder for holder in holders if holder != granted and holder not in beaten
                ]
        if kept or unused:
            leases = self._set_apart(granted.member, leases, kept, unused, steps_again)
        self._pushed[pushed] = leases
        return beaten

    def _set_apart(
        self,
        member: int,
        leases: tuple[Lease, ...],
        kept: Sequence[int],
        unused: Sequence[int],
        steps_again: bool,
    ) -> tuple[Lease, ...]:
        """Separate kept and unused leases from the others, which are returned."""
        stays = tuple(lease for lease in leases if lease.id in kept)
        if stays and len(stays) == len(leases) and steps_again:
            self._again[member] = stays
        elif stays:
            self._riding[member] = stays
        for lease in leases:
            if lease.id in unused and self._is_of_this_epoch(lease):
                self._fate[self._cuts.index(lease.id)] = _IS_UNUSED
        return tuple(lease for lease in leases if lease.id not in kept and lease.id not in unused)

    @property
    def is_unused(self) -> bool:
        """Whether samples of this epoch are unused, and none is in an update or was dropped."""
        return _IS_UNUSED in self._fate and not {*self._fate} - {_IS_UNUSED, _NOT_YET}

    def retire(self, pushed: Ticket, version: int) -> None:
        """Record that the update to `version` used this push; 0: it weighs nothing, no update."""
        for lease in self._pushed.pop(pushed):
            if self._is_of_this_epoch(lease):
                self._fate[self._cuts.index(lease.id)] = version or _IS_UNUSED

    def leave(self, ticket: Ticket, kept: Sequence[int]) -> list[Ticket]:
        """End a ticket whose script left the loop: only the kept leases contribute.

        Returns the tickets that held copies of kept leases; copies of the rest stay at work.
        """
        beaten: list[Ticket] = []
        own: list[Lease] = []
        for lease in self._work.pop(ticket):
            others = tuple(holder for holder in self._held.pop(lease.id, ()) if holder != ticket)
            if lease.id in kept:
                beaten += [holder for holder in others if holder not in beaten]
            elif others:
                self._held[lease.id] = others
                continue
            own.append(lease)
        unused = [lease.id for lease in own if lease.id not in kept]
        self._set_apart(ticket.member, tuple(own), kept, unused, steps_again=False)
        return beaten

    def close(self) -> int:
        """Hand out nothing more in this epoch.

        Returns:
            The number of samples that were never handed out, as far as known.
        """
        num_samples = 0
        if is_far(self._cuts.batches.end):
            self._cuts.cut_off()
        while (lease := self._cuts.take()) is not None:
            self._fate.append(_IS_UNUSED)
            num_samples += lease.num_samples
        free = self._returned
        for member in self.lookahead.members():
            num_samples += sum(lease.num_samples for lease in self.lookahead.untold(member))
            free += [lease.id for lease in self.lookahead.forget(member)]
        for lease_id in free:
            self._fate[self._cuts.index(lease_id)] = _IS_UNUSED
        self._returned = []
        return num_samples

    def end_at(self, position: int) -> None:
        """The stream ends before this position.

        Later leases are not handed out any more; a member that holds one gets no batch, and pushes
        it unused.
        """
        self._cuts.end_at(position)
        kept = self.lookahead.drop(self._cuts.is_beyond)
        returned, self._returned = self._returned, []
        for lease_id in (*(lease.id for lease in kept), *returned):
            self._return(lease_id)

    def _is_nothing(self, lease_id: int) -> bool:
        """Whether this lease of the epoch is after the end of a stream."""
        return self._cuts.end is not None and self._cuts.is_beyond(self._cuts.by_id(lease_id))

    def _return(self, lease_id: int) -> None:
        """Free a lease again, or mark it unused if it is after the end of a stream."""
        if self._is_nothing(lease_id):
            self._fate[self._cuts.index(lease_id)] = _IS_UNUSED
        else:
            heappush(self._returned, lease_id)

    def give_up(self, ticket: Ticket, *, is_abandoned: bool) -> None:
        """End a ticket at work, or a gathered push, without using it: its leases return.

        Args:
            is_abandoned: not lost with its member or beaten; dropped with ``dropped="skip"``.
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
            elif ticket in holders:  # else another's push won this lease
                self._held[lease.id] = tuple(holder for holder in holders if holder != ticket)

    def _end_hold(self, lease_id: int, fate: int) -> None:
        index = self._cuts.index(lease_id)
        if index < 0:
            return  # of an epoch that is over
        if fate == _IS_DROPPED and not self._is_nothing(lease_id):
            self._fate[index] = fate
        else:
            self._return(lease_id)

    def take_back(self, member: int) -> None:
        """Return the leases reserved for `member`, to prefetch or to be granted again."""
        for lease in (*self.lookahead.forget(member), *self._again.pop(member, ())):
            if self._is_of_this_epoch(lease):
                self._return(lease.id)

    def forget(self, member: int, *, is_for_good: bool) -> None:
        """`member` is gone: all that was reserved for it or rode on its next push returns.

        Args:
            is_for_good: riding leases are marked unused instead: their epoch is over.
        """
        self.take_back(member)
        for lease in filter(self._is_of_this_epoch, self._riding.pop(member, ())):
            if is_for_good:
                self._fate[self._cuts.index(lease.id)] = _IS_UNUSED
            else:
                self._return(lease.id)

    def look_ahead(self, num_at_once: int, *, num_single: int = 0, in_step: bool = False) -> None:
        """Reserve fresh leases for members that prefetch, see ``Lookahead.top_up``."""
        if self.is_sticky:
            num_at_once = 1  # a batch is dealt out to all, part by part
        self.lookahead.top_up(
            self._next_fresh_lease, self._cuts.num_left, num_at_once,
            num_single=num_single, in_step=in_step,
        )  # fmt: skip

    # -- questions ----------------------------------------------------------------------------

    @property
    def has_free(self) -> bool:
        """Whether a lease could be handed out now."""
        return bool(self._returned or self._cuts.has_more or self.lookahead)

    def num_free(self, at_most: int) -> int:
        """How many leases could be handed out now, counted up to `at_most`."""
        num_kept = sum(len(self.lookahead.kept(member)) for member in self.lookahead.members())
        return min(at_most, len(self._returned) + num_kept + self._cuts.num_left(at_most))

    @property
    def has_again(self) -> bool:
        """Whether a member is to be granted its leases again."""
        return bool(self._again)

    @property
    def has_riding(self) -> bool:
        """Whether a lease of this epoch rides on a later push."""
        return any(
            self._is_of_this_epoch(lease) for leases in self._riding.values() for lease in leases
        )

    @property
    def has_gathered(self) -> bool:
        """Whether a push waits for its update."""
        return bool(self._pushed)

    @property
    def is_done(self) -> bool:
        """Whether every lease of the epoch is retired or dropped."""
        return not (self._held or self._pushed or self._again or self.has_free)

    @property
    def end(self) -> int | None:
        """The end of this epoch's stream; None: not known yet, or no stream."""
        return self._cuts.end

    def done_with(self) -> tuple[int, tuple[int, ...]]:
        """Positions whose samples are not needed any more.

        Returns:
            The first position that is still needed, and the later ones that are not.
        """
        fate, leases, first = self._fate, self._cuts.leases, self._num_done
        while first < len(fate) and fate[first] != _NOT_YET:
            first += 1
        self._num_done = first
        position = leases[first].start if first < len(leases) else leases[-1].stop if leases else 0
        rest = range(first, len(fate))
        done = [leases[index] for index in rest if fate[index] != _NOT_YET]
        return position, tuple(at for lease in done for at in range(lease.start, lease.stop))

    def is_gathered(self, ticket: Ticket) -> bool:
        """Whether this push waits for its update."""
        return ticket in self._pushed

    def gathered(self) -> list[Ticket]:
        """The pushes that wait for their update, in the order they came."""
        return list(self._pushed)

    def leases_of(self, ticket: Ticket) -> tuple[Lease, ...]:
        """The leases of a ticket at work, or of a gathered push; empty for any other."""
        return self._work.get(ticket) or self._pushed.get(ticket, ())

    @property
    def num_batches(self) -> int:
        """Batches an epoch has: the length of the loader."""
        return self._cuts.batches.num_batches

    def first_id(self, position: int) -> int:
        """The id of the epoch's first lease from ``position`` on; 0: there is none."""
        return self._cuts.first_id(position)

    def begins_at(self, position: int) -> bool:
        """Whether a lease of the epoch begins at this position, or the epoch ends there."""
        return self._cuts.begins_at(position)

    def cut_all(self) -> list[Lease]:
        """All leases of the epoch in cut order, future ones included; changes nothing.

        For tests, which check where each of them is.
        """
        return self._cuts.all()

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The whole state, as JSON; equal states are equal ledgers."""
        return {
            "cuts": self._cuts.state(),
            "fate": list(self._fate),
            "num_dropped": self._fate.count(_IS_DROPPED),
            "returned": sorted(self._returned),
            "held": [
                [lease_id, list(map(list, tickets))] for lease_id, tickets in self._held.items()
            ],
            "work": _by_ticket(self._work),
            "pushed": _by_ticket(self._pushed),
            "again": _by_member(self._again),
            "riding": _by_member(self._riding),
            "lookahead": self.lookahead.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state()`; the ledger must have been made with the same sizes."""
        self._begin(Cuts.from_state(state["cuts"], self.every_epoch))
        self._fate, self._returned = list(state["fate"]), list(state["returned"])
        self._held = {
            lease_id: tuple(Ticket(*ticket) for ticket in tickets)
            for lease_id, tickets in state["held"]
        }
        self._work, self._pushed = (
            {Ticket(*ticket): _leases(rows) for ticket, rows in state[part]}
            for part in ("work", "pushed")
        )
        self._again, self._riding = (
            {member: _leases(rows) for member, rows in state[part]} for part in ("again", "riding")
        )
        self.lookahead.load(state["lookahead"], self._cuts.by_id)


def _by_ticket(leases_of: dict[Ticket, tuple[Lease, ...]]) -> list[list[list[Any]]]:
    """Whole leases: a riding one may be of an epoch whose cuts are gone."""
    return [[list(ticket), [*map(list, leases)]] for ticket, leases in leases_of.items()]


def _by_member(leases_of: dict[int, tuple[Lease, ...]]) -> list[list[Any]]:
    return [[member, [*map(list, leases_of[member])]] for member in sorted(leases_of)]


def _leases(rows: Sequence[Sequence[int]]) -> tuple[Lease, ...]:
    return tuple(Lease(*row) for row in rows)
