"""Rounds that members made among themselves, in the order in which the coordinator hears them.

Every member keeps the rows of the last rounds, so a dead one takes none along; each round is
passed on once. Pure.
"""

from collections.abc import Sequence

from ..wire.messages import Entry, Interrupted, Row


class RoundsBook:
    """The rounds of one epoch.

    Args:
        members: the peers, in member order.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = list(members)
        self._heard = 0
        self._interrupted: dict[int, Interrupted] = {}

    def take(self, first: int, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows that were not heard yet; ``first`` is the number of the first one."""
        new = rows[self._heard - first :] if self._heard > first else rows
        self._heard += len(new)
        return new

    def interrupted(self, member: int, message: Interrupted) -> None:
        """Its own push, and those that it saw."""
        self._interrupted[member] = message

    def all_interrupted(self, live: Sequence[int]) -> bool:
        return bool(live) and all(member in self._interrupted for member in live)

    def pending(self) -> list[tuple[int, Entry]]:
        """Pushes that lie in the slots and are in no update yet, in member order."""
        told = (
            (one, self._interrupted[one].push) for one in self.members if one in self._interrupted
        )
        return [(member, push) for member, push in told if push is not None] + self._of_the_dead()

    def _of_the_dead(self) -> list[tuple[int, Entry]]:
        """Pushes of members that died after all had arrived: the survivors saw them."""
        seen: dict[int, Entry] = {}
        for message in self._interrupted.values():
            for number, entry in zip(self.members, message.pushes, strict=False):
                if number not in self._interrupted and entry.num_samples:
                    seen[number] = entry
        return sorted(seen.items())
