"""Which lease is where: every sample of an epoch is in exactly one place and used exactly once.

A lease walks through these places, and the ledger always knows where it is:

    free --1--> held --2--> gathered --3--> retired       1  handed out with a ticket
     ^ |         ^ |           |                          2  pushed
     | 5         1 4           4                          3  applied
     | v         | |           |                          4  given up: returns, or is dropped
     | reserved -' |           |                             where asked
     `-------------+-----------'                          5  kept to be fetched ahead; taken back

    held --6--> riding --> held, returned                 6  pushed, and rides on a later push
    held --7--> unused                                    7  pushed, and nothing came of it

Returned leases go out first, lowest position first. In an epoch's tail one lease may be held by
several tickets: copies, of which the first push wins. A riding lease does not hold its epoch up: it
may be in an update of the next one.

Over 300 lines, in one file: that a lease is in one place can only be seen where all places are.
This module must not know of protocols, of who is alive, or of time; it never decides who works.
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

# Where else the version stands that retired a lease, from 1 on.
_NOT_YET, _IS_DROPPED, _IS_UNUSED = 0, -1, -2


class Ledger:
    """The leases of one epoch at a time; see `Batches` for how they are cut.

    Args:
        dropped: what becomes of work that was abandoned: "requeue" hands it out again, "skip"
            leaves it out of this epoch, as the papers do.
        is_sticky: part j of every batch is the j-th member's, and nobody else's.

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
        self._again: dict[int, tuple[Lease, ...]] = {}  # by member, to be granted once more
        self._riding: dict[int, tuple[Lease, ...]] = {}  # by member, on its next push
        self._begin(Cuts(self.every_epoch, -1, 0))

    def _begin(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self._fate: list[int] = []  # by lease: the version that retired it, or a mark
        self._num_done = 0  # leases from the first on that have one, counted up to a question
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
        """The lease that is `member`'s turn, taken out of its place; None if none is free."""
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
        """The same where each member keeps its part: a batch is dealt out to all of them."""
        part, batches = self.owners.index(member), self._cuts.batches
        mine = [
            one for one in self._returned if batches.part_at(self._cuts.by_id(one).start) == part
        ]
        if not mine and self.lookahead.oldest(member) is None:
            self.lookahead.keep_for_all(self.owners, self._next_fresh_lease)
        ahead = self.lookahead.oldest(member)
        if mine and (ahead is None or min(mine) < ahead.id):
            self._returned.remove(min(mine))
            heapify(self._returned)
            return self._cuts.by_id(min(mine))
        return None if ahead is None else self.lookahead.take(member)

    def _next_fresh_lease(self) -> Lease | None:
        lease = self._cuts.take()
        if lease is not None:
            self._fate.append(_NOT_YET)
        return lease

    # -- the walk of a lease ------------------------------------------------------------------

    def hand_out(self, ticket: Ticket, num_steps: int) -> tuple[Lease, ...]:
        """Give `ticket` up to `num_steps` free leases; empty if none is free.

        What rides on the member's next push comes first, besides those.
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
        """All that a ticket is to have: what rides on its push, and these."""
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
        """Whether its fate is kept here: one that rides may be of an epoch that is over."""
        return self._cuts.index(lease.id) >= 0

    def hand_out_copy(self, ticket: Ticket) -> tuple[Lease, ...]:
        """Give `ticket` a copy of the held lease with fewest holders, then of oldest grant."""
        held = [one for one in self._held if not self._is_nothing(one)]
        if not held:
            return ()
        lease_id = min(held, key=lambda one: len(self._held[one]))  # the first of equals
        self._held[lease_id] += (ticket,)
        return self._give(ticket, (self._cuts.by_id(lease_id),))

    def extend(self, ticket: Ticket, in_step_with: Sequence[int] = ()) -> Lease | None:
        """Give a ticket at work one more lease; None if none is free.

        Args:
            in_step_with: members that take fresh leases in turns: whoever asks first, each gets
                those that it would get if all asked in member order.
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
        """The work of `granted` came in as `pushed`; returns the tickets it beat to a lease.

        Args:
            kept: ids of leases that stay with the member: they ride on its next push.
            unused: ids of those that nothing came of.
            steps_again: where all are kept, the member is granted the same ones again.
        """
        leases = self._work.pop(granted)
        beaten: list[Ticket] = []
        for lease in leases:
            holders = self._held.pop(lease.id, ())
            if len(holders) > 1:
                beaten += [other for other in holders if other != granted and other not in beaten]
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
        """Put aside what stays with the member, and what it did nothing with; gives the rest."""
        stays = tuple(lease for lease in leases if lease.id in kept)
        if stays and len(stays) == len(leases) and steps_again:
            self._again[member] = stays
        elif stays:
            self._riding[member] = stays
        for lease in leases:
            if lease.id in unused and self._is_of_this_epoch(lease):
                self._fate[self._cuts.index(lease.id)] = _IS_UNUSED
        return tuple(one for one in leases if one.id not in kept and one.id not in unused)

    @property
    def is_unused(self) -> bool:
        """Whether samples of this epoch were left, and none is in an update or was dropped."""
        return _IS_UNUSED in self._fate and not {*self._fate} - {_IS_UNUSED, _NOT_YET}

    def retire(self, pushed: Ticket, version: int) -> None:
        """The update that made `version` used this push; 0: none was made, as it weighs nothing."""
        for lease in self._pushed.pop(pushed):
            if self._is_of_this_epoch(lease):
                self._fate[self._cuts.index(lease.id)] = version or _IS_UNUSED

    def leave(self, ticket: Ticket, kept: Sequence[int]) -> list[Ticket]:
        """The script left the loop with this ticket: but for what it keeps, nothing came of it.

        Returns the tickets that it beat to what it keeps; of the rest others may hold copies.
        """
        beaten: list[Ticket] = []
        mine: list[Lease] = []
        for lease in self._work.pop(ticket):
            others = tuple(one for one in self._held.pop(lease.id, ()) if one != ticket)
            if lease.id in kept:
                beaten += [one for one in others if one not in beaten]
            elif others:
                self._held[lease.id] = others
                continue
            mine.append(lease)
        unused = [lease.id for lease in mine if lease.id not in kept]
        self._set_apart(ticket.member, tuple(mine), kept, unused, steps_again=False)
        return beaten

    def close(self) -> int:
        """Hand nothing out any more in this epoch; how many samples never were, as far as that is
        known.
        """
        num_samples = 0
        if is_far(self._cuts.batches.end):
            self._cuts.cut_off()
        while (lease := self._cuts.take()) is not None:
            self._fate.append(_IS_UNUSED)
            num_samples += lease.num_samples
        back = self._returned
        for member in self.lookahead.members():
            num_samples += sum(lease.num_samples for lease in self.lookahead.untold(member))
            back += [lease.id for lease in self.lookahead.forget(member)]
        for lease_id in back:
            self._fate[self._cuts.index(lease_id)] = _IS_UNUSED
        self._returned = []
        return num_samples

    def end_at(self, position: int) -> None:
        """A stream has nothing at this position, nor after it.

        What lies behind is handed out no more; whoever holds such a lease finds nothing, and pushes
        it unused.
        """
        self._cuts.end_at(position)
        kept = self.lookahead.drop(self._cuts.is_beyond)
        returned, self._returned = self._returned, []
        for lease_id in (*(lease.id for lease in kept), *returned):
            self._return(lease_id)

    def _is_nothing(self, lease_id: int) -> bool:
        """Whether this lease of the epoch lies behind the end of a stream."""
        return self._cuts.end is not None and self._cuts.is_beyond(self._cuts.by_id(lease_id))

    def _return(self, lease_id: int) -> None:
        """It is free again, where it holds anything."""
        if self._is_nothing(lease_id):
            self._fate[self._cuts.index(lease_id)] = _IS_UNUSED
        else:
            heappush(self._returned, lease_id)

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
        index = self._cuts.index(lease_id)
        if index < 0:
            return  # of an epoch that is over
        if fate == _IS_DROPPED and not self._is_nothing(lease_id):
            self._fate[index] = fate
        else:
            self._return(lease_id)

    def take_back(self, member: int) -> None:
        """Keep nothing more for `member`, neither to fetch ahead nor to step on once more."""
        for lease in (*self.lookahead.forget(member), *self._again.pop(member, ())):
            if self._is_of_this_epoch(lease):
                self._return(lease.id)

    def forget(self, member: int, *, is_for_good: bool) -> None:
        """`member` is gone, with what rode on its next push: that returns.

        What is of an epoch that is over is in no update then, where it is gone `is_for_good`.
        """
        self.take_back(member)
        for lease in filter(self._is_of_this_epoch, self._riding.pop(member, ())):
            if is_for_good:
                self._fate[self._cuts.index(lease.id)] = _IS_UNUSED
            else:
                self._return(lease.id)

    def look_ahead(self, num_at_once: int, *, num_single: int = 0, in_step: bool = False) -> None:
        """Keep fresh leases for those that fetch ahead, see ``Lookahead.top_up``."""
        if self.is_sticky:
            num_at_once = 1  # a batch is dealt out to all, part by part
        self.lookahead.top_up(
            self._next_fresh_lease, self._cuts.num_left, num_at_once,
            num_single=num_single, in_step=in_step,
        )  # fmt: skip

    # -- questions ----------------------------------------------------------------------------

    @property
    def has_free(self) -> bool:
        """Whether somebody could be handed a lease now."""
        return bool(self._returned or self._cuts.has_more or self.lookahead)

    def num_free(self, at_most: int) -> int:
        """How many leases somebody could be handed now, counted up to this number."""
        num_kept = sum(len(self.lookahead.kept(one)) for one in self.lookahead.members())
        return min(at_most, len(self._returned) + num_kept + self._cuts.num_left(at_most))

    @property
    def has_again(self) -> bool:
        """Whether a member is to be granted what it has once more."""
        return bool(self._again)

    @property
    def has_riding(self) -> bool:
        """Whether a lease of this epoch rides on a push to come."""
        return any(self._is_of_this_epoch(one) for row in self._riding.values() for one in row)

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
        """Where the stream of this epoch ends, once that is known."""
        return self._cuts.end

    def done_with(self) -> tuple[int, tuple[int, ...]]:
        """Of which leases nobody will need the samples any more.

        Returns:
            The position before which that is all of them, and those after it.
        """
        fate, leases, first = self._fate, self._cuts.leases, self._num_done
        while first < len(fate) and fate[first] != _NOT_YET:
            first += 1
        self._num_done = first
        position = leases[first].start if first < len(leases) else leases[-1].stop if leases else 0
        rest = range(first, len(fate))
        done = [leases[one] for one in rest if fate[one] != _NOT_YET]
        return position, tuple(at for one in done for at in range(one.start, one.stop))

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

    def first_id(self, position: int) -> int:
        """Of the first lease of the epoch from ``position`` on; 0: there is none."""
        return self._cuts.first_id(position)

    def begins_at(self, position: int) -> bool:
        """Whether a lease of the epoch, as it is cut now, begins there, or the epoch ends there."""
        return self._cuts.begins_at(position)

    def cut_all(self) -> list[Lease]:
        """All leases of the epoch in cut order, those to come included; changes nothing.

        For tests, which look where each of them is.
        """
        return self._cuts.all()

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
            "again": _by_member(self._again),
            "riding": _by_member(self._riding),
            "lookahead": self.lookahead.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become what `state()` described. The sizes given at the construction must be the same."""
        self._begin(Cuts.from_state(state["cuts"], self.every_epoch))
        self._fate, self._returned = list(state["fate"]), list(state["returned"])
        self._held = {lease_id: tuple(Ticket(*t) for t in by) for lease_id, by in state["held"]}
        self._work, self._pushed = (
            {Ticket(*ticket): _leases(rows) for ticket, rows in state[part]}
            for part in ("work", "pushed")
        )
        self._again, self._riding = (
            {member: _leases(rows) for member, rows in state[part]} for part in ("again", "riding")
        )
        self.lookahead.load(state["lookahead"], self._cuts.by_id)


def _by_ticket(leases_of: dict[Ticket, tuple[Lease, ...]]) -> list[list[list[Any]]]:
    """Whole leases: one that rides may be of an epoch whose cuts are no longer here."""
    return [[list(ticket), [*map(list, leases)]] for ticket, leases in leases_of.items()]


def _by_member(leases_of: dict[int, tuple[Lease, ...]]) -> list[list[Any]]:
    return [[member, [*map(list, leases_of[member])]] for member in sorted(leases_of)]


def _leases(rows: Sequence[Sequence[int]]) -> tuple[Lease, ...]:
    return tuple(Lease(*row) for row in rows)
