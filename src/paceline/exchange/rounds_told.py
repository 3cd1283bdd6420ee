"""The rounds that peers have made, kept until the coordinator is told of them.

Telling is off the critical path: the first member does it now and then. This module must not know
how a round is made.
"""

import time
from collections import deque

from ..wire.channel import Channel
from ..wire.messages import Entry, Rounds, Row

_TELL_S = 0.2
_KEPT_ROUNDS = 4096
_SENT_ENTRIES = 512
"""In one message."""


class RoundsTold:
    """The rounds of one epoch.

    Args:
        num_workers: entries of a round.
    """

    def __init__(self, lane: Channel, num_workers: int) -> None:
        self._lane = lane
        self._rows: deque[tuple[int, Row]] = deque(maxlen=_KEPT_ROUNDS)
        self._size = max(1, _SENT_ENTRIES // num_workers)
        self._next = 0
        self._tell_at_s = time.perf_counter() + _TELL_S

    def note(self, number: int, entries: list[Entry], snapshot: int) -> bool:
        """Keep a round, and the checkpoint that is taken after it; whether it is time to tell."""
        now_s = time.perf_counter()
        self._rows.append((number, Row(now_s, tuple(entries), snapshot)))
        if now_s <= self._tell_at_s:
            return False
        self._tell_at_s = now_s + _TELL_S
        return True

    def tell(self) -> None:
        """Send all rounds since the last time, several in a message."""
        rows = [(number, row) for number, row in self._rows if number >= self._next]
        for start in range(0, len(rows), self._size):
            part = rows[start : start + self._size]
            self._lane.send(Rounds(part[0][0], tuple(row for _, row in part)))
        if rows:
            self._next = rows[-1][0] + 1
