"""Who is alive, what each member is doing, and what a protocol may therefore decide.

    join --> waiting --1--> pending --2--> at work         1  released by the protocol
               ^ ^            |  ^           | |           2  granted: its ticket is current
               | '-----3------'  '-----4-----' |           3  the release is withdrawn
               '---------------5---------------'           4  its work is another's now, or skipped
                                                           5  it pushed, or was cancelled

An id is one life of one worker and never used twice. Decisions are checked before the first of them
is carried out:

    Apply     of at least one gathered push, each named once; as many weights, which sum to 1;
              where a staleness rule scales them, none is below 0 and they sum to at most 1
    Discard   of a gathered push, not named before
    Cancel    of a live member that it has released and that has not pushed since
    Release   of a live member that waits for it, for at least one step

The fact they react to is not yet in the books then, so that a refusal leaves them as they were:
to the check, who just pushed or joined already waits, and who left is gone. It must not know of
leases, nor any one protocol.
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
        self.num_steps = 0  # that it was released for
        self.ticket: Ticket | None = None  # current while it is at work


class Membership:
    """The live members and those that have left."""

    __slots__ = ("departed", "live", "num_at_work", "pending")

    def __init__(self) -> None:
        self.live: dict[int, Member] = {}
        self.departed: dict[int, int] = {}  # id -> its next serial: what it pushed may still arrive
        self.pending: dict[int, int] = {}  # id -> the steps it was released for
        self.num_at_work = 0

    # -- changes ------------------------------------------------------------------------------

    def join(self, member: int) -> None:
        """A new member waits for the protocol."""
        self.live[member] = Member()

    def leave(self, member: int) -> Ticket | None:
        """The member is gone; returns the ticket it was at work on, if any."""
        ticket = self.end_work(member)
        self.pending.pop(member, None)
        self.departed[member] = self.live.pop(member).next_serial
        return ticket

    def begin_work(self, ticket: Ticket) -> None:
        """The ticket of a pending member becomes current."""
        member = self.live[ticket.member]
        member.num_steps = self.pending.pop(ticket.member)
        member.ticket = ticket
        member.next_serial = ticket.serial + 1
        self.num_at_work += 1

    def end_work(self, member: int) -> Ticket | None:
        """The member has no current ticket any longer; returns the one it had, if any."""
        record = self.live[member]
        ticket, record.ticket = record.ticket, None
        self.num_at_work -= ticket is not None
        return ticket

    def withdraw(self, member: int) -> None:
        """A member at work becomes pending again, for as many steps."""
        self.end_work(member)
        self.pending[member] = self.live[member].num_steps

    # -- questions ----------------------------------------------------------------------------

    def check_new(self, member: int) -> None:
        """Raise unless `member` may join."""
        if member in self.live or member in self.departed:
            raise ProtocolError(f"member {member} joined twice; a worker that returns is a new one")

    def check_known(self, member: int) -> None:
        """Raise unless `member` has joined."""
        if member not in self.live and member not in self.departed:
            raise ProtocolError(f"member {member} has never joined; live: {sorted(self.live)}")

    def ticket_for(self, pushed: Ticket) -> Ticket | None:
        """The current ticket that a push answers, None if that has ended.

        A push carries the version that was really pulled: member and serial tell whose it is.
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
            raise ProtocolError(f"{pushed!r} was pushed and never granted")
        return None

    def is_at_work(self, member: int) -> bool:
        """Whether this live member has a current ticket."""
        return self.live[member].ticket is not None

    def is_waiting(self, member: int) -> bool | None:
        """Whether the protocol has not released this member; None if it is not live."""
        record = self.live.get(member)
        return None if record is None else record.ticket is None and member not in self.pending

    @property
    def num_waiting(self) -> int:
        """How many wait for the protocol."""
        return len(self.live) - len(self.pending) - self.num_at_work

    # -- saving -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can carry it."""
        return {
            "live": [
                [id_, m.next_serial, m.num_steps, m.ticket and list(m.ticket)]
                for id_, m in self.live.items()
            ],
            "departed": sorted(map(list, self.departed.items())),
            "pending": sorted(map(list, self.pending.items())),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become what `state()` described."""
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
        is_gathered: whether this ticket's push is in the books and in no update yet.
        is_scaled: a staleness rule makes weights smaller.
    """
    unbooked = fact.ticket if isinstance(fact, Pushed) else None
    waits: dict[int, bool | None] = {}  # what differs from the books; None: gone
    if unbooked is not None:
        waits[unbooked.member] = True
    elif isinstance(fact, Joined | Left):
        waits[fact.member] = True if isinstance(fact, Joined) else None
    named: set[Ticket] = set()
    for decision in decisions:
        if isinstance(decision, Release):
            if _is_waiting(decision.member, waits, members) is not True or decision.num_steps < 1:
                raise _refusal(decision, fact, "only who waits is released, for at least 1 step")
            waits[decision.member] = False
        elif isinstance(decision, Cancel):
            if _is_waiting(decision.member, waits, members) is not False:
                raise _refusal(decision, fact, "only who was released can be cancelled")
            waits[decision.member] = True
        else:
            tickets = (decision.ticket,) if isinstance(decision, Discard) else decision.tickets
            for ticket in tickets:
                if ticket in named or not (ticket == unbooked or is_gathered(ticket)):
                    raise _refusal(decision, fact, f"{ticket!r} is not a push that is gathered")
                named.add(ticket)
            if isinstance(decision, Apply):
                _check_weights(decision, fact, is_scaled)


def _is_waiting(member: int, waits: dict[int, bool | None], members: Membership) -> bool | None:
    return waits[member] if member in waits else members.is_waiting(member)


def _check_weights(update: Apply, fact: Fact, is_scaled: bool) -> None:
    weights = update.weights
    total, is_legal = sum(weights), len(weights) == len(update.tickets)
    if not is_scaled:
        if not is_legal or abs(total - 1.0) > _WEIGHT_TOLERANCE:
            raise _refusal(update, fact, "an update needs one weight a push, and a sum of 1")
    elif not is_legal or not min(weights) >= 0.0 or total > 1.0 + _WEIGHT_TOLERANCE:
        rule = "an update needs one weight a push, none below 0, and a sum of at most 1"
        raise _refusal(update, fact, rule)


def _refusal(decision: Decision, fact: Fact, rule: str) -> ProtocolError:
    return ProtocolError(f"the protocol decided {decision!r} on {fact!r}: {rule}")
