"""The page of words through which the members of one machine see each other.

    first        the run: version, jobs, alarm, ...
    then 7 lines a seat: [cancelled, gone, beats, told] [arrived] [undo mark, chunks]
                         [what it pushed last: numbers, three lines] [the loss scale it began with]

A seat is a worker's place; at any time one member sits on it. Every word has 64 bits, so that none
comes to its end, and one writer at a time, named below. Lines are given out one after the other, so
no two names share one. This module must not know what a version or an arrival leads to.
"""

from collections.abc import Collection
from itertools import count
from typing import Final

from .memory import LINE_BYTES, WORD_BYTES, Memory, Words

_WORDS_A_LINE = LINE_BYTES // WORD_BYTES
_SEAT_LINES = 7
NUMBERS: Final = 17
"""Of a seat's last push."""
_line = count()


def _words(num_words: int = 1) -> int:
    """The first of so many words on lines of their own."""
    first = next(_line) * _WORDS_A_LINE
    for _ in range(1, -(-num_words // _WORDS_A_LINE)):
        next(_line)
    return first


VERSION: Final = _words()
"""Twice the newest whole version, plus the number of the block that it lies in: one word, so that
both change at once (writer: who executes the update)."""
JOBS: Final = _words()
"""Number of jobs done (writer: who executes them, one after the other)."""
MET: Final = _words()
"""The barrier that all peers have come to (writer: who comes last, and who sees that all have come
before it is written; all write the same)."""
ALARM: Final = _words()
"""Not 0: peers go on through the store at their next barrier (writer: coordinator, any member)."""
LAYOUT: Final = _words()
"""1 when the store holds the parameters as the main worker prepared them, 2 when as its script
began the first epoch with them (writer: the main member)."""
GENERATION: Final = (_words(), _words())
"""For each block: odd while it is being written."""
CHUNK: Final = _words(3)
"""Chunks of the pass under way that are done."""
CHUNK_UNDO: Final = CHUNK + 1
"""Number of the chunk (from 1) whose old content lies in the undo area."""
PASS: Final = CHUNK + 2
"""Number of the pass under way over the accumulator."""
MOST_SCHEDULES: Final = 8
"""Prepared schedulers: each has a word on each of the three lines below, or two."""
RHYTHMS: Final = _words(MOST_SCHEDULES)
"""A word for each scheduler: its rhythm (writer: any member that found it; all find the same)."""
COUNTS: Final = _words(2 * MOST_SCHEDULES)
"""Two words for each scheduler: its steps by now, and when the last epoch ended (writer: any member
that takes them in its own loop; all take the same)."""
ARGUMENTS: Final = _words(MOST_SCHEDULES)
"""A float64 for each scheduler: the argument of the last of its steps (likewise)."""
NORM: Final = _words(2)
"""A float64: the norm of the averaged gradient that is being clipped (writer: who executes)."""
PUSH_SCALE: Final = NORM + 1
"""A float64: what distance has left of the push under way (writer: who executes)."""
HAS_SCALE: Final = _words()
"""1 when some member scales its losses (writer: any member)."""
SCALE: Final = (_words(6), _words(6))
"""For even and odd versions: six float64, the loss scale (writer: who executes)."""

SKIPPED: Final = (_words(), _words())
"""For even and odd versions: updates until then that changed nothing (writer: who executes)."""
SNAPSHOT: Final = _words(3)
"""Number of the checkpoint that was asked for last (writer: coordinator)."""
ONCE: Final = SNAPSHOT + 1
"""The last block of ``pace.once()`` that somebody has gone through, as ``exchange/turns.py`` counts
them (writer: the main member)."""
INSIDE: Final = SNAPSHOT + 2
"""1 more than the seat of who goes first through such a block now; else 0 (the same writer)."""

NORMS_KEPT: Final = 8
"""The newest versions whose norms are kept."""
NORMS: Final = _words(2 * NORMS_KEPT)
"""For each: a version as a float64, and the norm of its gradient (writer: who executes)."""

_RUN_LINES = next(_line)


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
        self.told = [index + 3 for index in self.cancelled]
        """Per seat: the version up to which it has told the coordinator of what peers did (writer:
        the member)."""
        self.arrived = [self._seat(seat, 1) for seat in range(num_seats)]
        """Per seat: barriers reached (writer: the member)."""
        self.marks = [self._seat(seat, 2) for seat in range(num_seats)]
        """Per seat: the version whose share lies in the undo block (writer: the member)."""
        self.kept = [index + 1 for index in self.marks]
        """Per seat: how many chunks of it do (writer: the member)."""
        self.numbers = [self._seat(seat, 3) for seat in range(num_seats)]
        """Per seat: ``NUMBERS`` float64 about its last push (writer: the member)."""
        self.offers = [self._seat(seat, 6) for seat in range(num_seats)]
        """Per seat: six float64, the loss scale that it began with (writer: the member)."""

    def clear(self, gone: Collection[int] = ()) -> None:
        """As at the start, while no member writes; these seats have no member any more."""
        for index in range(control_bytes(self.num_seats) // WORD_BYTES):
            self[index] = 0
        for seat in gone:
            self[self.gone[seat]] = 1

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
