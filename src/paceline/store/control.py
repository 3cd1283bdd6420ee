"""The page of words through which the members of one machine see each other.

    line 0..17   the run: version, jobs, alarm, ...
    then 6 lines a seat: [cancelled, gone, beats] [arrived] [undo mark]
                         [what it pushed last: numbers] [the loss scale that it began with]

A seat is a worker's place; at any time one member sits on it. Every word has one writer at a
time, named below. This module must not know what a version or an arrival leads to.
"""

from typing import Final

from .memory import LINE_BYTES, Memory, Words

_WORDS_A_LINE = LINE_BYTES // 4
_RUN_LINES = 18
_SEAT_LINES = 6

VERSION: Final = 0 * _WORDS_A_LINE
"""Twice the newest whole version, plus the number of the block that it lies in: one word, so that
both change at once (writer: who executes the update)."""
JOBS: Final = 1 * _WORDS_A_LINE
"""Number of jobs done (writer: who executes them, one after the other)."""
ALARM: Final = 2 * _WORDS_A_LINE
"""Not 0: members leave the express path at their next barrier (writer: coordinator, any member)."""
LAYOUT: Final = 3 * _WORDS_A_LINE
"""1 when the store's memory is laid out and holds the first member's parameters."""
GENERATION: Final = (4 * _WORDS_A_LINE, 5 * _WORDS_A_LINE)
"""For each block: odd while it is being written."""
CHUNK: Final = 6 * _WORDS_A_LINE
"""Chunks of the pass under way that are done."""
CHUNK_UNDO: Final = 6 * _WORDS_A_LINE + 1
"""Number of the chunk (from 1) whose old content lies in the undo area."""
PASS: Final = 6 * _WORDS_A_LINE + 2
"""Number of the pass under way over the accumulator."""
MOST_SCHEDULES: Final = 8
"""Prepared schedulers: each has a word on each of the three lines below, or two."""
RHYTHMS: Final = 7 * _WORDS_A_LINE
"""A word for each scheduler: its rhythm (writer: any member that found it; all find the same)."""
COUNTS: Final = 16 * _WORDS_A_LINE
"""Two words for each scheduler: its steps by now, and when the last epoch ended (writer: any member
that takes them in its own loop; all take the same)."""
ARGUMENTS: Final = 17 * _WORDS_A_LINE
"""A float64 for each scheduler: the argument of the last of its steps (likewise)."""
NORM: Final = 8 * _WORDS_A_LINE
"""A float64: the norm of the averaged gradient that is being clipped (writer: who executes)."""
PUSH_SCALE: Final = 8 * _WORDS_A_LINE + 2
"""A float64: what distance has left of the push under way (writer: who executes)."""
HAS_SCALE: Final = 9 * _WORDS_A_LINE
"""1 when some member scales its losses (writer: any member)."""
SCALE: Final = (10 * _WORDS_A_LINE, 11 * _WORDS_A_LINE)
"""For even and odd versions: six float64, the loss scale (writer: who executes)."""
BEGAN: Final = 14 * _WORDS_A_LINE
"""A float64: the machine's clock when the first epoch opened, seconds (writer: coordinator)."""

SKIPPED: Final = (12 * _WORDS_A_LINE, 13 * _WORDS_A_LINE)
"""For even and odd versions: updates until then that changed nothing (writer: who executes)."""
SNAPSHOT: Final = 15 * _WORDS_A_LINE
"""Number of the checkpoint that was asked for last (writer: coordinator)."""
ONCE: Final = 15 * _WORDS_A_LINE + 1
"""Blocks of ``pace.once()`` that somebody has gone through (writer: the main member)."""
INSIDE: Final = 15 * _WORDS_A_LINE + 2
"""1 more than the seat of who goes first through such a block now; else 0 (the same writer)."""

NORMS: Final = 16 * _WORDS_A_LINE
"""Eight pairs of float64: a version, and the norm of its gradient (writer: who executes)."""


class Control(Words):
    """The words of one run.

    Args:
        memory: at least ``control_bytes(num_seats)``, zeroed.
    """

    def __init__(self, memory: Memory, num_seats: int) -> None:
        super().__init__(memory)
        self.num_seats = num_seats
        self.cancelled = [self._seat(seat, 0) for seat in range(num_seats)]
        """Per seat: serials below this are cancelled (writer: coordinator)."""
        self.gone = [index + 1 for index in self.cancelled]
        """Per seat: 1 when its member has ended, what it wrote is final (writer: coordinator)."""
        self.beats = [index + 2 for index in self.cancelled]
        """Per seat: grows where its member gets on, and stands still while it does not (writer:
        the member)."""
        self.arrived = [self._seat(seat, 1) for seat in range(num_seats)]
        """Per seat: barriers reached (writer: the member)."""
        self.marks = [self._seat(seat, 2) for seat in range(num_seats)]
        """Per seat: the version whose share lies in the undo block (writer: the member)."""
        self.numbers = [self._seat(seat, 3) for seat in range(num_seats)]
        """Per seat: sixteen float64 about its last push (writer: the member)."""
        self.offers = [self._seat(seat, 5) for seat in range(num_seats)]
        """Per seat: six float64, the loss scale that it began with (writer: the member)."""

    @property
    def version(self) -> int:
        return self[VERSION] >> 1

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Whether ``version`` is there, waiting for it for at most ``timeout_s``."""
        if self[VERSION] >> 1 >= version:
            return True
        return self.wait_while(VERSION, lambda value: value >> 1 < version, timeout_s)

    def wait_for_job(self, job: int, timeout_s: float) -> bool:
        """Whether ``job`` is done, waiting for it for at most ``timeout_s``."""
        if self[JOBS] >= job:
            return True
        return self.wait_while(JOBS, lambda value: value < job, timeout_s)

    def _seat(self, seat: int, line: int) -> int:
        return (_RUN_LINES + _SEAT_LINES * seat + line) * _WORDS_A_LINE


def control_bytes(num_seats: int) -> int:
    return (_RUN_LINES + _SEAT_LINES * num_seats) * LINE_BYTES
