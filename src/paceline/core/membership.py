"""Who is alive, and what each member is doing: one of three states, and how it changes.

    join --> waiting --1--> pending --2--> at work         1  released by the protocol
               ^ ^            |  ^           | |           2  granted: its ticket is current
               | '-----3------'  '-----4-----' |           3  the release is withdrawn
               '---------------5---------------'           4  its work is another's now, or skipped
                                                           5  it pushed, or was cancelled

An id is one life of one worker and never used twice. It must not know of leases or protocols.
"""

from typing import Any

from ..errors import ProtocolError
from ..events import Ticket


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
