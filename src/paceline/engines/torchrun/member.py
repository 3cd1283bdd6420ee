"""A rank's side of the exchange: its own control words and store, and lines gathered by all.

    LAYOUT         main: its words and its block -> broadcast -> all others
    ONCE           main: a key of the meeting place        others poll it
    lines          once a round: a rank's numbers, its loss scale, which gradients it has, and the
                   state of its schedulers; with the last bucket of gradients, if there is one
                   (averaging.py), else by an all-gather
    ALARM, SNAPSHOT   rank 0's page is the controller's, too; all others read them in its line

Either collective ends when all ranks have joined it, so it is the barrier; without new lines there
is no barrier. Members never write to each other's store, so what a second barrier protects in
other engines is safe here. This module must not know messages or protocols.
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
"""The size of a rank's line, without the flags of which gradients it has."""
_SHARE_WORD = len(Line._fields)
"""The word after a line: see averaging.py."""
_LAID = (LAYOUT, VERSION, *SKIPPED, HAS_SCALE, *(word + i for word in SCALE for i in range(6)))
"""Words that are broadcast with the main member's block."""
_SCHEDULES = ((RHYTHMS, MOST_SCHEDULES), (COUNTS, 2 * MOST_SCHEDULES), (ARGUMENTS, MOST_SCHEDULES))
_FIRST = 1
"""LAYOUT's value when the model is laid out as it was prepared (exchange/turns.py)."""
_ONCE_KEY = "once"
_OTHER_RHYTHM = 1
"""See ``script/shared_schedule.py``."""


class RankControl(Control):
    """The control words of one rank.

    Args:
        words: the store in which the main member publishes ONCE.

    Attributes:
        carrier: shares the initial layout.
    """

    carrier: "RankCarrier"

    def __init__(self, page: SharedMemory, num_seats: int, words: Store) -> None:
        super().__init__(page, num_seats)
        self._words = words

    def set_and_wake(self, index: int, value: int) -> None:
        super().set_and_wake(index, value)
        if index == LAYOUT:
            self.carrier.share()
            if value == _FIRST:  # all others fetch it now, and the script may change it afterwards
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
        asleep: int | None = None,
    ) -> bool:
        if index == LAYOUT and is_early(self[LAYOUT]):
            self.carrier.take()
        elif index == ONCE and self._words.check([_ONCE_KEY]):
            self[ONCE] = int(self._words.get(_ONCE_KEY))
        return super().wait_while(index, is_early, timeout_s, is_soon=is_soon, asleep=asleep)


class RankCarrier:
    """This rank's own control words and store; see ``exchange.member.Carrier``.

    Args:
        words: a connection to the meeting place.
    """

    is_shared = False
    is_split = False

    def __init__(self, num_seats: int, seat: int, group: RankGroup, words: Store) -> None:
        self.page = SharedMemory.create(control_bytes(num_seats))
        self.arena = SharedMemory.create()
        """On rank 0 the controller sets its size, and writes checkpoints from it."""
        self._group, self._seat = group, seat
        control = RankControl(self.page, num_seats, words)
        control.carrier = self
        self.control: Control = control
        self._store: SharedStore | None = None
        self._under_way: list[Pending] = []

    def open_store(self, layout: Layout, num_bytes: int) -> SharedStore:
        if self._seat:  # if the model is split, this rank's part differs from rank 0's
            own_bytes = arena_bytes(layout, self.control.num_seats)
            self.arena.grow(own_bytes if self.is_split else num_bytes)
        self._store = SharedStore(layout, self.arena.tensor(), self.control, has_peers=False)
        return self._store

    def barrier(self, seat: int, clock: Clock) -> Barrier:
        """Return the barrier at which all lines are gathered."""
        return GatheredLines(self.control, seat, clock, self._group, self)

    def present(self, seat: int) -> memoryview:
        """Return which gradients this seat's push has; empty before there is a store."""
        if self._store is None or self.is_split:
            return memoryview(bytearray())
        return self._store.present(seat)

    # -- the main member's initial layout -------------------------------------------------------

    def share(self) -> None:
        """Start broadcasting it; the others fetch it with `take`."""
        assert self._store is not None
        self.settle()
        words = torch.tensor([self.control[word] for word in _LAID])
        block = self._store.blocks[self._store.current]
        self._under_way = [self._group.begin_to_share(tensor) for tensor in (words, block)]

    def settle(self) -> None:
        """Wait until all have received it; then the block may change."""
        for transfer in self._under_way:
            transfer.wait()
        self._under_way = []

    def take(self) -> None:
        """Receive the main member's next broadcast."""
        assert self._store is not None
        words = torch.empty(len(_LAID), dtype=torch.int64)
        self._group.begin_to_share(words).wait()
        values = dict(zip(_LAID, words.tolist(), strict=True))
        self._group.begin_to_share(self._store.blocks[values[VERSION] & 1]).wait()
        for index, value in values.items():
            self.control[index] = value


class GatheredLines(Barrier):
    """The lines of one run, as the rank on ``seat`` shows and reads them.

    Attributes:
        take_along: gathers lines within another collective: takes this rank's line and the buffer
            for all lines, both as bytes; returns whether it did. All ranks return the same.
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
        """Gather the words written since the last epoch; all ranks open an epoch together."""
        if self._seat:  # the controller resets rank 0's, and may have set it again by now
            self._control[ALARM] = 0
        self.arrive()

    def show(self, line: Line) -> None:
        super().show(line)
        self._has_shown = True

    def show_share(self, share: float) -> None:
        """Show this seat's share of the mean beside its next line."""
        self._control.set_double(self._control.numbers[self._seat] + _SHARE_WORD, share)

    def shares(self) -> list[float]:
        """Return the shares of all seats."""
        return [self._control.double(first + _SHARE_WORD) for first in self._control.numbers]

    def _set(self, column: int, value: float) -> None:
        super()._set(column, value)
        self._has_shown = True

    def wait(self) -> None:
        if self._has_shown:
            self.arrive()

    def arrive(self) -> int:
        """Exchange lines with all others; returns when all have arrived."""
        start = time.perf_counter()
        self._has_shown = False
        present = self._make_room()
        offset = 0
        for part in self._parts:
            size = part.stop - part.start
            self._own_bytes[offset : offset + size] = self._page[part]
            offset += size
        self._own_bytes[offset : offset + len(present)] = present
        if self.take_along is None or not self.take_along(self._own, self._all):
            self._group.near_ranks.all_gather(self._own, self._all).wait()
        self._take()
        self._clock.wait_s += time.perf_counter() - start
        return 0

    @property
    def num_bytes(self) -> int:
        """The size of all lines."""
        self._make_room()
        return len(self._all)

    def _make_room(self) -> memoryview:
        """Allocate buffers if the size of lines has changed; returns this rank's gradient flags."""
        present = self._carrier.present(self._seat)
        size = -(-(self._num_lines + len(present)) // WORD_BYTES) * WORD_BYTES
        if size != self._size:
            self._size = size
            self._own = torch.zeros(size, dtype=torch.uint8)
            self._all = torch.zeros(self._control.num_seats * size, dtype=torch.uint8)
            self._own_bytes, self._all_bytes = (_view(lines) for lines in (self._own, self._all))
        return present

    def _take(self) -> None:
        control, size = self._control, self._size
        schedules = self._num_lines - 4 * MOST_SCHEDULES * WORD_BYTES
        differ = False
        for seat in range(control.num_seats):
            line = self._all_bytes[seat * size : (seat + 1) * size]
            start = _LINE_WORDS * WORD_BYTES
            self._page[_bytes_of(control.numbers[seat], _LINE_WORDS)] = line[:start]
            end = start + _OFFER_WORDS * WORD_BYTES
            self._page[_bytes_of(control.offers[seat], _OFFER_WORDS)] = line[start:end]
            present = self._carrier.present(seat)
            present[:] = line[self._num_lines : self._num_lines + len(present)]
            differ |= (
                line[schedules - WORD_BYTES : self._num_lines]
                != (self._own_bytes[schedules - WORD_BYTES : self._num_lines])
            )
        if differ:
            self._merge(schedules)

    def _merge(self, start: int) -> None:
        """Merge loss scales and schedulers: the state that has been stepped most often wins."""
        control, size = self._control, self._size
        first = start - WORD_BYTES
        lines = [
            self._all_bytes[seat * size + first : seat * size + self._num_lines].cast("q")
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
