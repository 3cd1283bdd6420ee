"""The shared words through which the members of one machine see each other.

    first        the run: version, jobs, alarm, ...
    then 7 lines a seat: [cancelled, gone, beats, told] [arrived, asleep] [undo mark, chunks]
                         [numbers of its last push, three lines] [its initial loss scale]

A seat is a worker's place, taken by one member at a time. Every word has 64 bits, so that it never
overflows, and one writer at a time, named below. Lines are allocated one after the other, so no two
names share one. This module must not know what follows from a version or an arrival.
"""

from collections.abc import Collection
from itertools import count
from typing import Final

from .memory import LINE_BYTES, WORD_BYTES, Memory, Words

_WORDS_A_LINE = LINE_BYTES // WORD_BYTES
_SEAT_LINES = 7
NUMBERS: Final = 17
"""Numbers of a seat's last push."""
_line = count()


def _words(num_words: int = 1) -> int:
    """Allocate so many words on lines of their own; returns the first."""
    first = next(_line) * _WORDS_A_LINE
    for _ in range(1, -(-num_words // _WORDS_A_LINE)):
        next(_line)
    return first


VERSION: Final = _words()
"""Twice the newest whole version, plus the number of its block: one word, so that both change at
once (writer: the member that executes the update)."""
JOBS: Final = _words()
"""Number of jobs done (writer: the member that executes one, in turn)."""
MET: Final = _words()
"""The barrier that all peers have reached (writer: the last one, and any that sees this before it
is written; all write the same)."""
ALARM: Final = _words()
"""Not 0: peers go on through the store at their next barrier (writer: coordinator, any member)."""
LAYOUT: Final = _words()
"""1: the store holds the parameters as the main worker prepared them; 2: as they were when its
script began the first epoch (writer: the main member)."""
GENERATION: Final = (_words(), _words())
"""For each block: odd while it is being written."""
CHUNK: Final = _words(3)
"""Chunks done in the current pass."""
CHUNK_UNDO: Final = CHUNK + 1
"""Number of the chunk (from 1) whose old content is in the undo area."""
PASS: Final = CHUNK + 2
"""Number of the current pass over the accumulator."""
MOST_SCHEDULES: Final = 8
"""Maximum of prepared schedulers: each has a word or two on each of the three lines below."""
RHYTHMS: Final = _words(MOST_SCHEDULES)
"""A word for each scheduler: its rhythm (writer: any member that detects it; all find the same)."""
COUNTS: Final = _words(2 * MOST_SCHEDULES)
"""Two words for each scheduler: its steps until now, and until the last epoch's end (writer: any
member that takes them in its own loop; all take the same)."""
ARGUMENTS: Final = _words(MOST_SCHEDULES)
"""A float64 for each scheduler: the argument of the last of its steps (likewise)."""
NORM: Final = _words(2)
"""A float64: the norm of the averaged gradient that is being clipped (writer: the executor)."""
PUSH_SCALE: Final = NORM + 1
"""A float64: the scale of the current push by its distance (writer: the executor)."""
HAS_SCALE: Final = _words()
"""1 when some member scales its losses (writer: any member)."""
SCALE: Final = (_words(6), _words(6))
"""For even and odd versions: six float64, the loss scale (writer: the executor)."""

SKIPPED: Final = (_words(), _words())
"""For even and odd versions: updates until then that changed nothing (writer: the executor)."""
SNAPSHOT: Final = _words(5)
"""Number of the last checkpoint requested (writer: coordinator)."""
MAIN: Final = SNAPSHOT + 3
"""1 + the seat of the main member, if it is to write what scripts keep into that checkpoint; else 0
(writer: coordinator)."""
KEEPS: Final = SNAPSHOT + 4
"""1 when a script keeps objects of its own in checkpoints (writer: any member)."""
ONCE: Final = SNAPSHOT + 1
"""The last block of ``pace.once()`` that a member has passed, as counted by ``exchange/turns.py``
(writer: the main member)."""
INSIDE: Final = SNAPSHOT + 2
"""1 + the seat of the member that is now first in such a block; else 0 (the same writer)."""

NORMS_KEPT: Final = 8
"""The newest versions whose norms are kept."""
NORMS: Final = _words(2 * NORMS_KEPT)
"""For each: a version as a float64, and the norm of its gradient (writer: the executor)."""

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
        """Per seat: 1 if its member has ended, so its words are final (writer: coordinator)."""
        self.beats = [index + 2 for index in self.cancelled]
        """Per seat: grows while its member makes progress (writer: the member)."""
        self.told = [index + 3 for index in self.cancelled]
        """Per seat: the version up to which it has reported the peers' updates to the coordinator
        (writer: the member)."""
        self.arrived = [self._seat(seat, 1) for seat in range(num_seats)]
        """Per seat: barriers reached (writer: the member)."""
        self.asleep = [index + 1 for index in self.arrived]
        """Per seat: 1 while its member sleeps at a barrier (writer: the member)."""
        self.marks = [self._seat(seat, 2) for seat in range(num_seats)]
        """Per seat: the version whose share is in the undo block (writer: the member)."""
        self.kept = [index + 1 for index in self.marks]
        """Per seat: how many of its chunks are there (writer: the member)."""
        self.numbers = [self._seat(seat, 3) for seat in range(num_seats)]
        """Per seat: ``NUMBERS`` float64 about its last push (writer: the member)."""
        self.offers = [self._seat(seat, 6) for seat in range(num_seats)]
        """Per seat: six float64, its initial loss scale (writer: the member)."""

    def clear(self, gone: Collection[int] = ()) -> None:
        """Reset all words, while no member writes; ``gone`` seats have no member any more."""
        for index in range(control_bytes(self.num_seats) // WORD_BYTES):
            self[index] = 0
        for seat in gone:
            self[self.gone[seat]] = 1

    @property
    def version(self) -> int:
        return self[VERSION] >> 1

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Wait for ``version`` for at most ``timeout_s``; returns whether it is there."""
        if self[VERSION] >> 1 >= version:
            return True
        return self.wait_while(VERSION, lambda value: value >> 1 < version, timeout_s)

    def wait_for_job(self, job: int, timeout_s: float) -> bool:
        """Wait for ``job`` for at most ``timeout_s``; returns whether it is done."""
        if self[JOBS] >= job:
            return True
        return self.wait_while(JOBS, lambda value: value < job, timeout_s)

    def _seat(self, seat: int, line: int) -> int:
        return (_RUN_LINES + _SEAT_LINES * seat + line) * _WORDS_A_LINE


def control_bytes(num_seats: int) -> int:
    return (_RUN_LINES + _SEAT_LINES * num_seats) * LINE_BYTES
