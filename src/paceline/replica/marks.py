"""Whether bytes are still what they were: all of few, of many a sample that moves.

    few     |################|                 every byte, against a copy
    many    |#...|#...|#...|#...|   step 1     as many lines in every step, evenly spread,
            |.#..|.#..|.#..|.#..|   step 2     so that each is looked at in its turn

An edit of a whole tensor is seen at once, one of a few bytes after a round of the sample at the
latest, if it is made again and again; who must know for certain compares everything. This module
must not know what the bytes mean.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_WHOLE_BYTES = 128 << 10
"""To copy and to compare so much takes 10 us; 60 us where it is in no cache any more."""
_LINE_BYTES = 256
"""Two pairs of cache lines: what the processor fetches together."""
_NUM_LINES = 128
"""Each costs two misses of the caches and of the page table; together less than 0.3 % of a step of
60 ms."""

Range = tuple[int, int]


class Marks:
    """Stretches of one memory.

    Args:
        memory: bytes, ``(n,)`` uint8.
        ranges: ``[start, stop)`` in bytes, each a multiple of 64 or the memory's end.
    """

    def __init__(self, memory: Tensor, ranges: Sequence[Range]) -> None:
        total = sum(stop - start for start, stop in ranges)
        self._stretches: list[_Whole | _Sampled] = []
        for start, stop in ranges:
            if total <= _WHOLE_BYTES:
                self._stretches.append(_Whole(memory, start, stop))
                continue
            middle = stop - (stop - start) % _LINE_BYTES
            if start < middle:
                count = max(1, _NUM_LINES * (middle - start) // total)
                self._stretches.append(_Sampled(memory, start, middle, count))
            if middle < stop:
                self._stretches.append(_Whole(memory, middle, stop))
        self.is_whole = total <= _WHOLE_BYTES
        """Whether every byte is looked at."""

    def set(self, source: Tensor | None = None) -> None:
        """What is there now is what should be; ``source``: what lies there, at the same offsets."""
        for one in self._stretches:
            one.set(source)

    def changed(self) -> int | None:
        """Where a byte is another one, in bytes from the memory's beginning; None: nowhere."""
        for one in self._stretches:
            if (offset := one.changed()) is not None:
                return offset
        return None


class _Whole:
    """Every byte of ``[start, stop)``."""

    def __init__(self, memory: Tensor, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._mine = memory[start:stop]
        self._kept = torch.zeros_like(self._mine)

    def set(self, source: Tensor | None) -> None:
        part = self._mine if source is None else source[self._start : self._stop]
        self._kept.copy_(part)

    def changed(self) -> int | None:
        offset = first_difference(self._mine, self._kept)
        return None if offset is None else self._start + offset


class _Sampled:
    """``count`` lines of ``[start, stop)`` at a time, others after each ``set``."""

    def __init__(self, memory: Tensor, start: int, stop: int, count: int) -> None:
        self._start, self._stop = start, stop
        self._every = -(-((stop - start) // _LINE_BYTES) // count)
        self._shift = 0
        self._mine = self._lines_of(memory)
        self._kept: Any = b""

    def _lines_of(self, memory: Tensor) -> Any:
        """``(lines, words)``; in NumPy where it may be: its calls cost a fifth of torch's."""
        lines = memory[self._start : self._stop].view(torch.int64).view(-1, _LINE_BYTES // 8)
        return lines.numpy() if memory.device.type == "cpu" else lines

    def set(self, source: Tensor | None) -> None:
        self._shift = (self._shift + 1) % self._every
        every = self._mine if source is None else self._lines_of(source)
        lines = every[self._shift :: self._every]
        self._kept = lines.clone() if isinstance(lines, Tensor) else lines.tobytes()

    def changed(self) -> int | None:
        lines = self._mine[self._shift :: self._every]
        if isinstance(lines, Tensor):
            if torch.equal(lines, self._kept):
                return None
            row = int((lines != self._kept).any(1).nonzero()[0])
        else:
            now = lines.tobytes()
            if now == self._kept:
                return None
            row = next(i for i, one in enumerate(now) if one != self._kept[i]) // _LINE_BYTES
        return self._start + (self._shift + row * self._every) * _LINE_BYTES


def first_difference(one: Tensor, other: Tensor) -> int | None:
    """The first byte in which two memories of one device differ, or None; nan equals itself."""
    if one.device.type == "cpu":  # torch.equal takes five times as long
        if _compare(one.data_ptr(), other.data_ptr(), one.numel()) == 0:
            return None
    elif torch.equal(one, other):
        return None
    return int((one != other).nonzero()[0])


_compare: Any = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
