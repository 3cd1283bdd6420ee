"""The live members, their state, and the decisions that a protocol may make about them.

    join --> waiting --1--> pending --2--> at work         1  released by the protocol
               ^ ^            |  ^           | |           2  granted: its ticket is current
               | '-----3------'  '-----4-----' |           3  the release is withdrawn
               '---------------5---------------'           4  its work is another's, or skipped
                                                           5  it pushed, or was cancelled

An id is one life of one worker and never used twice. All decisions are checked before any of them
is carried out:

    Apply     of at least one gathered push, each used once; one weight a push, with a sum of 1;
              if a staleness rule scales them, none below 0 and a sum of at most 1
    Discard   of a gathered push, not used before
    Cancel    of a live member that was released and has not pushed since
    Release   of a live member that waits, for at least one step

The fact that caused them is not recorded yet, so that a refusal changes nothing: for the check, a
member that just pushed or joined already waits, and one that left is gone. This module must not
know leases, nor any one protocol.
"""

from collections.abc import Callable
from typing import Any

from ..errors import ProtocolError
from ..events import Apply, Cancel, Decision, Discard, Fact, Joined, Left, Pushed, Release, Ticket

_WEIGHT_TOLERANCE = 1e-9  # a sum of 1e6 float64 weights is off by less than 1e-10


class Member:
    """One live member."""

    __slots__ = ("next_serial", "num_steps", "ticket")

    def __init__(self, next_serial: int = 0) -> None:
        self.next_serial = next_serial
        self.num_steps = 0  # of its release
        self.ticket: Ticket | None = None  # current while it is at work


class Membership:
    """The live members and those that have left."""

    __slots__ = ("departed", "live", "num_at_work", "pending")

    def __init__(self) -> None:
        self.live: dict[int, Member] = {}
        self.departed: dict[int, int] = {}  # id -> next serial: its pushes may still arrive
        self.pending: dict[int, int] = {}  # id -> steps of its release
        self.num_at_work = 0

    # -- changes ------------------------------------------------------------------------------

    def join(self, member: int) -> None:
        """Add a new member, which waits for the protocol."""
        self.live[member] = Member()

    def leave(self, member: int) -> Ticket | None:
        """Remove a member; returns the ticket that it was at work on, if any."""
        ticket = self.end_work(member)
        self.pending.pop(member, None)
        self.departed[member] = self.live.pop(member).next_serial
        return ticket

    def begin_work(self, ticket: Ticket) -> None:
        """Make the ticket of a pending member current."""
        member = self.live[ticket.member]
        member.num_steps = self.pending.pop(ticket.member)
        member.ticket = ticket
        member.next_serial = ticket.serial + 1
        self.num_at_work += 1

    def end_work(self, member: int) -> Ticket | None:
        """End the member's current ticket and return it, if any."""
        record = self.live[member]
        ticket, record.ticket = record.ticket, None
        self.num_at_work -= ticket is not None
        return ticket

    def withdraw(self, member: int) -> None:
        """Make a member at work pending again, for as many steps."""
        self.end_work(member)
        self.pending[member] = self.live[member].num_steps

    # -- questions ----------------------------------------------------------------------------

    def check_new(self, member: int) -> None:
        """Raise unless `member` may join."""
        if member in self.live or member in self.departed:
            raise ProtocolError(f"member {member} joined twice; a returning worker needs a new id")

    def check_known(self, member: int) -> None:
        """Raise unless `member` has joined."""
        if member not in self.live and member not in self.departed:
            raise ProtocolError(f"member {member} has never joined; live: {sorted(self.live)}")

    def ticket_for(self, pushed: Ticket) -> Ticket | None:
        """The current ticket that a push belongs to; None if that ticket has ended.

        A push has the version that was really pulled; member and serial identify the ticket.
        Raises ProtocolError if no such ticket was ever granted.
        """
        member = self.live.get(pushed.member)
        if member is not None:
            if member.ticket is not None and member.ticket.serial == pushed.serial:
                return member.ticket
            next_serial = member.next_serial
        else:
            self.check_known(pushed.member)
            next_serial = self.departed[pushed.member]
        if not 0 <= pushed.serial < next_serial:
            raise ProtocolError(f"{pushed!r} was pushed but never granted")
        return None

    def is_at_work(self, member: int) -> bool:
        """Whether this live member has a current ticket."""
        return self.live[member].ticket is not None

    def is_waiting(self, member: int) -> bool | None:
        """Whether this member waits for a release; None if it is not live."""
        record = self.live.get(member)
        return None if record is None else record.ticket is None and member not in self.pending

    @property
    def num_waiting(self) -> int:
        """How many members wait for a release."""
        return len(self.live) - len(self.pending) - self.num_at_work

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The whole state, as JSON."""
        return {
            "live": [
                [
                    member,
                    record.next_serial,
                    record.num_steps,
                    record.ticket and list(record.ticket),
                ]
                for member, record in self.live.items()
            ],
            "departed": sorted(map(list, self.departed.items())),
            "pending": sorted(map(list, self.pending.items())),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state()`."""
        self.live = {}
        for member, next_serial, num_steps, ticket in state["live"]:
            self.live[member] = record = Member(next_serial)
            record.num_steps = num_steps
            record.ticket = ticket and Ticket(*ticket)
        self.departed = dict(state["departed"])
        self.pending = dict(state["pending"])
        self.num_at_work = sum(record.ticket is not None for record in self.live.values())


def check_decisions(
    decisions: list[Decision],
    fact: Fact,
    members: Membership,
    is_gathered: Callable[[Ticket], bool],
    *,
    is_scaled: bool = False,
) -> None:
    """Raise ProtocolError if any of the decisions on `fact` breaks a rule.

    Args:
        is_gathered: whether this ticket's push is recorded and in no update yet.
        is_scaled: a staleness rule scales weights down.
    """
    new_push = fact.ticket if isinstance(fact, Pushed) else None
    waits: dict[int, bool | None] = {}  # changes that are not recorded yet; None: gone
    if new_push is not None:
        waits[new_push.member] = True
    elif isinstance(fact, Joined | Left):
        waits[fact.member] = True if isinstance(fact, Joined) else None
    used: set[Ticket] = set()
    for decision in decisions:
        if isinstance(decision, Release):
            if _is_waiting(decision.member, waits, members) is not True or decision.num_steps < 1:
                raise _refusal(
                    decision, fact, "only a waiting member can be released, for at least 1 step"
                )
            waits[decision.member] = False
        elif isinstance(decision, Cancel):
            if _is_waiting(decision.member, waits, members) is not False:
                raise _refusal(decision, fact, "only a released member can be cancelled")
            waits[decision.member] = True
        else:
            tickets = (decision.ticket,) if isinstance(decision, Discard) else decision.tickets
            for ticket in tickets:
                if ticket in used or not (ticket == new_push or is_gathered(ticket)):
                    raise _refusal(decision, fact, f"{ticket!r} is not a gathered push")
                used.add(ticket)
            if isinstance(decision, Apply):
                _check_weights(decision, fact, is_scaled)


def _is_waiting(member: int, waits: dict[int, bool | None], members: Membership) -> bool | None:
    return waits[member] if member in waits else members.is_waiting(member)


def _check_weights(update: Apply, fact: Fact, is_scaled: bool) -> None:
    weights = update.weights
    total, is_legal = sum(weights), len(weights) == len(update.tickets)
    if not is_scaled:
        if not is_legal or abs(total - 1.0) > _WEIGHT_TOLERANCE:
            raise _refusal(update, fact, "an update needs one weight a push, with a sum of 1")
    elif not is_legal or not min(weights) >= 0.0 or total > 1.0 + _WEIGHT_TOLERANCE:
        rule = "an update needs one weight a push, none below 0, with a sum of at most 1"
        raise _refusal(update, fact, rule)


def _refusal(decision: Decision, fact: Fact, rule: str) -> ProtocolError:
    return ProtocolError(f"the protocol decided {decision!r} on {fact!r}: {rule}")
