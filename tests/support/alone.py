"""A protocol by itself: facts given by hand, tickets counted, decisions recorded."""

from paceline.events import (
    Apply,
    Cancel,
    Decision,
    Exhausted,
    Joined,
    Left,
    Pushed,
    Release,
    Stalled,
    Ticket,
)
from paceline.protocols import parse
from paceline.protocols.staleness import parse_staleness


class Alone:
    """Gives facts to a protocol and records who works at which version."""

    def __init__(self, text: str, num_members: int, staleness: str = "none") -> None:
        self.protocol = parse(text, num_members)
        self.protocol.staleness = parse_staleness(staleness)
        self.version = 0
        self.working: dict[int, Ticket] = {}
        self._serials: dict[int, int] = {}
        self.staleness_versions: list[int] = []
        for member in range(num_members):
            self.join(member)

    def join(self, member: int) -> list[Decision]:
        return self._carry_out(self.protocol.react(Joined(member, 0.0)))

    def push(self, member: int, num_samples: int = 1, at_s: float = 0.0) -> list[Decision]:
        fact = Pushed(self.working.pop(member), num_samples, 0.5, True, at_s)
        return self._carry_out(self.protocol.answer(fact, self.version))

    def leave(self, member: int) -> list[Decision]:
        self.working.pop(member, None)
        return self._carry_out(self.protocol.react(Left(member, 0.0)))

    def stall(self, member: int) -> list[Decision]:
        return self._carry_out(self.protocol.react(Stalled(member, 0.0)))

    def exhaust(self) -> list[Decision]:
        return self._carry_out(self.protocol.react(Exhausted(0.0)))

    def _carry_out(self, decisions: list[Decision]) -> list[Decision]:
        for decision in decisions:
            if isinstance(decision, Apply):
                self.staleness_versions += [self.version - t.version for t in decision.tickets]
                self.version += 1
            elif isinstance(decision, Cancel):
                del self.working[decision.member]
            elif isinstance(decision, Release):
                member = decision.member
                assert member not in self.working
                self._serials[member] = self._serials.get(member, -1) + 1
                self.working[member] = Ticket(member, self._serials[member], self.version)
        return decisions


def updates(decisions: list[Decision]) -> list[Apply]:
    return [decision for decision in decisions if isinstance(decision, Apply)]


def released(decisions: list[Decision]) -> list[int]:
    return [decision.member for decision in decisions if isinstance(decision, Release)]


def cancelled(decisions: list[Decision]) -> list[int]:
    return [decision.member for decision in decisions if isinstance(decision, Cancel)]
