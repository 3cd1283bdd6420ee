"""Cores that workers share: who has waited longest computes next, a slice of time at a turn.

    wants a core --free--> turn --its slice is over--> the next one's turn, and to the queue's end
                 `--none--> queue                  `--nothing is left to do--> done

Who computes for less than a slice has a core until it is done, as processes on a machine do; who
computes for far longer gets an equal share of the cores, all the time. So two workers that begin
together on one core are done at about the same time, and calling one off makes the other faster. It
must not know what is computed, nor heaps of events.
"""

import math
from collections import deque
from typing import NamedTuple

SLICE_S = 3e-3
"""What Linux lets a process compute while others wait (EEVDF, 2.8 ms on eight cores and more)."""
_MOST_TURNS = 20
"""For the ticket that takes least: more would cost events and change nothing."""
_GRAIN = 1e-6
"""Of a slice: what is less than this is what rounding left."""


class Turn(NamedTuple):
    """A worker has a core for one slice."""

    member: int
    from_s: float
    until_s: float


class Cores:
    """The cores, whose turn it is, and who waits.

    Args:
        num_cores: how many there are.
        slice_s: how long a turn lasts where others wait.
    """

    def __init__(self, num_cores: int, slice_s: float = SLICE_S) -> None:
        self._num_free = num_cores
        self._slice_s = slice_s
        self._waiting: deque[int] = deque()
        self._turns: dict[int, Turn] = {}
        self._left_s: dict[int, float] = {}
        self._busy_s: dict[int, float] = {}
        self._least_s = math.inf  # of them

    def enter(self, member: int, at_s: float, busy_s: float) -> Turn | None:
        """A member wants a core for so long; its first turn, if a core is free."""
        self._left_s[member] = self._busy_s[member] = busy_s
        self._least_s = min(self._least_s, busy_s)
        self._waiting.append(member)
        if not self._num_free:
            return None
        self._num_free -= 1
        return self._next(at_s)

    def is_under_way(self, turn: Turn) -> bool:
        """Whether nobody called it off."""
        return self._turns.get(turn.member) is turn

    def pass_on(self, turn: Turn) -> tuple[bool, Turn | None]:
        """A turn is over: whether its member is done, and whose turn it is now at this core."""
        member = turn.member
        del self._turns[member]
        self._left_s[member] -= turn.until_s - turn.from_s
        is_done = self._left_s[member] <= _GRAIN * self._slice_s
        if is_done:
            self._forget(member)
        else:
            self._waiting.append(member)
        return is_done, self._next(turn.until_s)

    def leave(self, member: int, at_s: float) -> Turn | None:
        """A member that is not done is called off; whose turn it is if it had a core."""
        self._forget(member)
        if self._turns.pop(member, None) is not None:
            return self._next(at_s)
        self._waiting.remove(member)
        return None

    def __contains__(self, member: object) -> bool:
        """Whether this member computes, or waits for a core."""
        return member in self._left_s

    def _forget(self, member: int) -> None:
        del self._left_s[member]
        if self._busy_s.pop(member) == self._least_s:
            self._least_s = min(self._busy_s.values(), default=math.inf)

    def _next(self, at_s: float) -> Turn | None:
        """The turn of whoever has waited longest, at a core that is free."""
        if not self._waiting:
            self._num_free += 1
            return None
        member = self._waiting.popleft()
        slice_s = max(self._slice_s, self._least_s / _MOST_TURNS)
        length_s = min(slice_s, self._left_s[member])
        turn = self._turns[member] = Turn(member, at_s, at_s + length_s)
        return turn
