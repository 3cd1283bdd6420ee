"""A rank's side of the exchange: words and a store of its own, lines that all gather.

    LAYOUT         main: its words and its block -> broadcast -> all others
    ONCE           main: a key of the meeting place        others look for it
    lines          once a round: a rank's numbers, its loss scale, which gradients it has, and what
                   its schedulers have come to; with the last bucket of gradients, where there is
                   one (averaging.py), else by an all-gather
    ALARM, SNAPSHOT   rank 0's page is the controller's, too; all others read them in its line

Either ends when all have come, so it is the barrier; what nobody has shown anything for is
none. Members never write into each other's memory, so all that a second barrier guards elsewhere is
safe here. This module must not know messages or protocols.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its stubs

from ...exchange.base import Clock
from ...exchange.group import Pending
from ...exchange.rounds import Barrier, Line
from ...store.control import (
    ALARM,
    ARGUMENTS,
    COUNTS,
    HAS_SCALE,
    LAYOUT,
    MOST_SCHEDULES,
    NUMBERS,
    ONCE,
    RHYTHMS,
    SCALE,
    SKIPPED,
    VERSION,
    Control,
    control_bytes,
)
from ...store.layout import Layout
from ...store.memory import WORD_BYTES, SharedMemory
from ...store.parameter_store import SharedStore, arena_bytes
from .group import RankGroup

_LINE_WORDS, _OFFER_WORDS = NUMBERS, 6
LINE_BYTES = (_LINE_WORDS + _OFFER_WORDS + 1 + 4 * MOST_SCHEDULES) * WORD_BYTES
"""Of what a rank shows in a round, but for which gradients it has."""
_SHARE_WORD = len(Line._fields)
"""Behind a line: see averaging.py."""
_LAID = (LAYOUT, VERSION, *SKIPPED, HAS_SCALE, *(word + i for word in SCALE for i in range(6)))
"""Words that go with the main member's block."""
_SCHEDULES = ((RHYTHMS, MOST_SCHEDULES), (COUNTS, 2 * MOST_SCHEDULES), (ARGUMENTS, MOST_SCHEDULES))
_FIRST = 1
"""What LAYOUT says when the model is laid out as it was prepared (exchange/turns.py)."""
_ONCE_KEY = "once"
_OTHER_RHYTHM = 1
"""See ``script/shared_schedule.py``."""


class RankControl(Control):
    """The words of one rank.

    Args:
        words: where the main member tells what it has gone through first.

    Attributes:
        carrier: shares what was laid out.
    """

    carrier: "RankCarrier"

    def __init__(self, page: SharedMemory, num_seats: int, words: Store) -> None:
        super().__init__(page, num_seats)
        self._words = words

    def set_and_wake(self, index: int, value: int) -> None:
        super().set_and_wake(index, value)
        if index == LAYOUT:
            self.carrier.share()
            if value == _FIRST:  # all others come for it now, and the script may go on to change it
                self.carrier.settle()
        elif index == ONCE:
            self._words.set(_ONCE_KEY, str(value))

    def wait_while(
        self,
        index: int,
        is_early: Any,
        timeout_s: float,
        *,
        is_soon: bool = True,
    ) -> bool:
        if index == LAYOUT and is_early(self[LAYOUT]):
            self.carrier.take()
        elif index == ONCE and self._words.check([_ONCE_KEY]):
            self[ONCE] = int(self._words.get(_ONCE_KEY))
        return super().wait_while(index, is_early, timeout_s, is_soon=is_soon)


class RankCarrier:
    """Words and a store of this rank's own; see ``exchange.member.Carrier``.

    Args:
        words: a connection to the meeting place.
    """

    is_shared = False
    is_split = False

    def __init__(self, num_seats: int, seat: int, group: RankGroup, words: Store) -> None:
        self.page = SharedMemory.create(control_bytes(num_seats))
        self.arena = SharedMemory.create()
        """Of rank 0 the controller gives it its size, and writes checkpoints from it."""
        self._group, self._seat = group, seat
        control = RankControl(self.page, num_seats, words)
        control.carrier = self
        self.control: Control = control
        self._store: SharedStore | None = None
        self._under_way: list[Pending] = []

    def open_store(self, layout: Layout, num_bytes: int) -> SharedStore:
        if self._seat:  # of a part that is another than rank 0's
            own = arena_bytes(layout, self.control.num_seats)
            self.arena.grow(own if self.is_split else num_bytes)
        self._store = SharedStore(layout, self.arena.tensor(), self.control, has_peers=False)
        return self._store

    def barrier(self, seat: int, clock: Clock) -> Barrier:
        """The lines of all, gathered."""
        return GatheredLines(self.control, seat, clock, self._group, self)

    def present(self, seat: int) -> memoryview:
        """Which gradients this seat's push has; before there is a store none."""
        if self._store is None or self.is_split:
            return memoryview(bytearray())
        return self._store.present(seat)

    # -- what the main member has laid out ------------------------------------------------------

    def share(self) -> None:
        """It goes to all others as soon as they come for it."""
        assert self._store is not None
        self.settle()
        words = torch.tensor([self.control[word] for word in _LAID])
        block = self._store.blocks[self._store.current]
        self._under_way = [self._group.begin_to_share(tensor) for tensor in (words, block)]

    def settle(self) -> None:
        """All have what was shared: the block may change."""
        for transfer in self._under_way:
            transfer.wait()
        self._under_way = []

    def take(self) -> None:
        """What the main member shares next becomes this one's."""
        assert self._store is not None
        words = torch.empty(len(_LAID), dtype=torch.int64)
        self._group.begin_to_share(words).wait()
        values = dict(zip(_LAID, words.tolist(), strict=True))
        self._group.begin_to_share(self._store.blocks[values[VERSION] & 1]).wait()
        for index, value in values.items():
            self.control[index] = value


class GatheredLines(Barrier):
    """The lines of one run, as the rank at ``seat`` shows and reads them.

    Attributes:
        take_along: brings all lines to all by something that is under way anyhow: is given this
            rank's, and where all go, both bytes; whether it has done so. All ranks answer alike.
    """

    take_along: Callable[[Tensor, Tensor], bool] | None = None

    def __init__(
        self, control: Control, seat: int, clock: Clock, group: RankGroup, carrier: RankCarrier
    ) -> None:
        super().__init__(control, seat, clock)
        self._group, self._carrier = group, carrier
        self._page = memoryview(carrier.page.buffer)
        own = [(control.numbers[seat], _LINE_WORDS), (control.offers[seat], _OFFER_WORDS)]
        self._parts = [_bytes_of(*one) for one in (*own, (HAS_SCALE, 1), *_SCHEDULES)]
        self._num_lines = sum(part.stop - part.start for part in self._parts)
        self._has_shown = False
        self._size = -1

    def settle(self) -> None:
        """See ``RankCarrier.settle``."""
        self._carrier.settle()

    def begin(self, phase: int) -> None:
        """An epoch opens, at the same round in all: words that were written since the last one."""
        if self._seat:  # the first one's was put down by the controller, which may ask anew by now
            self._control[ALARM] = 0
        self.arrive()

    def show(self, line: Line) -> None:
        super().show(line)
        self._has_shown = True

    def show_share(self, share: float) -> None:
        """What this seat's gradient was multiplied by, beside the line that is shown next."""
        self._control.set_double(self._control.numbers[self._seat] + _SHARE_WORD, share)

    def shares(self) -> list[float]:
        """Those of all seats."""
        return [self._control.double(first + _SHARE_WORD) for first in self._control.numbers]

    def _set(self, column: int, value: float) -> None:
        super()._set(column, value)
        self._has_shown = True

    def wait(self) -> None:
        if self._has_shown:
            self.arrive()

    def arrive(self) -> int:
        """Show what is new, and have what all others show; returns when all have come."""
        start = time.perf_counter()
        self._has_shown = False
        present = self._make_room()
        at = 0
        for part in self._parts:
            size = part.stop - part.start
            self._own[at : at + size] = self._page[part]
            at += size
        self._own[at : at + len(present)] = present
        if self.take_along is None or not self.take_along(self._mine, self._all):
            self._group.all_gather(self._mine, self._all).wait()
        self._take()
        self._clock.wait_s += time.perf_counter() - start
        return 0

    @property
    def num_bytes(self) -> int:
        """Of the lines of all."""
        self._make_room()
        return len(self._all)

    def _make_room(self) -> memoryview:
        """For lines as they are now; which gradients this rank has."""
        present = self._carrier.present(self._seat)
        size = -(-(self._num_lines + len(present)) // WORD_BYTES) * WORD_BYTES
        if size != self._size:
            self._size = size
            self._mine = torch.zeros(size, dtype=torch.uint8)
            self._all = torch.zeros(self._control.num_seats * size, dtype=torch.uint8)
            self._own, self._every = (_view(words) for words in (self._mine, self._all))
        return present

    def _take(self) -> None:
        control, size = self._control, self._size
        schedules = self._num_lines - 4 * MOST_SCHEDULES * WORD_BYTES
        differ = False
        for seat in range(control.num_seats):
            line = self._every[seat * size : (seat + 1) * size]
            at = _LINE_WORDS * WORD_BYTES
            self._page[_bytes_of(control.numbers[seat], _LINE_WORDS)] = line[:at]
            end = at + _OFFER_WORDS * WORD_BYTES
            self._page[_bytes_of(control.offers[seat], _OFFER_WORDS)] = line[at:end]
            present = self._carrier.present(seat)
            present[:] = line[self._num_lines : self._num_lines + len(present)]
            differ |= (
                line[schedules - WORD_BYTES : self._num_lines]
                != (self._own[schedules - WORD_BYTES : self._num_lines])
            )
        if differ:
            self._merge(schedules)

    def _merge(self, start: int) -> None:
        """Loss scales and schedulers: who has stepped more often knows better."""
        control, size = self._control, self._size
        lines = [
            self._every[seat * size + start - WORD_BYTES : seat * size + self._num_lines].cast("q")
            for seat in range(control.num_seats)
        ]
        control[HAS_SCALE] = max(line[0] for line in lines)
        for number in range(MOST_SCHEDULES):
            rhythm, count = 1 + number, 1 + MOST_SCHEDULES + number
            end, argument = count + MOST_SCHEDULES, count + 2 * MOST_SCHEDULES
            best = max(lines, key=lambda line: (line[count], line[rhythm]))
            is_other = any(line[rhythm] == _OTHER_RHYTHM for line in lines)
            control[RHYTHMS + number] = _OTHER_RHYTHM if is_other else best[rhythm]
            control[COUNTS + number] = best[count]
            control[COUNTS + MOST_SCHEDULES + number] = max(line[end] for line in lines)
            control[ARGUMENTS + number] = best[argument]


def _bytes_of(first: int, num_words: int) -> slice:
    return slice(first * WORD_BYTES, (first + num_words) * WORD_BYTES)


def _view(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)
