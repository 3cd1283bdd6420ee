"""Rounds that members made among themselves, in the order in which the coordinator hears them.

Every member keeps the rows of the last rounds, so a dead one takes none along; each round is
passed on once. An entry is (num_samples, loss, fault, clocks, weight). Pure.
"""

from collections.abc import Sequence

from ..sessions.lane import Message

Entry = tuple[int, float, int, tuple[float, float, float, float], float]
"""Of a member that had a mini-batch; of others ``num_samples`` is 0."""
Row = tuple[float, Sequence[Entry], int]
"""When the round was over (the machine's monotonic clock, seconds), an entry a member, and the
number of the checkpoint that was taken after it, or 0."""


Pending = tuple[int, float, int, tuple[float, float, float, float], float, tuple[float, float]]
"""A push that is in no update yet: an entry, and what it asks to be clipped to."""


class RoundsBook:
    """The rounds of one epoch.

    Args:
        members: the peers, in member order.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = list(members)
        self._heard = 0
        self._interrupted: dict[int, Message] = {}

    def take(self, first: int, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows that were not heard yet; ``first`` is the number of the first one."""
        new = rows[self._heard - first :] if self._heard > first else rows
        self._heard += len(new)
        return new

    def interrupted(self, member: int, message: Message) -> None:
        """``("interrupted", entry, entries)``: its own push, and those that it saw."""
        self._interrupted[member] = message

    def all_interrupted(self, live: Sequence[int]) -> bool:
        return bool(live) and all(member in self._interrupted for member in live)

    def pending(self) -> list[tuple[int, Pending]]:
        """Pushes that lie in the slots and are in no update yet, in member order."""
        return [
            (member, self._interrupted[member][1])
            for member in self.members
            if member in self._interrupted and self._interrupted[member][1] is not None
        ] + self._of_the_dead()

    def _of_the_dead(self) -> list[tuple[int, Pending]]:
        """Pushes of members that died after all had arrived: the survivors saw them."""
        seen: dict[int, Pending] = {}
        for message in self._interrupted.values():
            for number, entry in zip(self.members, message[2] or (), strict=False):
                if number not in self._interrupted and entry[0]:
                    seen[number] = entry
        return sorted(seen.items())
