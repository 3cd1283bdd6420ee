"""A stream that is read once for all workers of a machine; its mini-batches are kept by number.

    the user's data set -> a loader worker, m samples, collate -> StreamReading -> clients
                                                                    |
      first needed           handed out, kept          read ahead   |  not read yet
      .......|--------------------------------------|--------------|.......
             until an update has used them           at most ``most_ahead``

Number n of a pass is the n-th mini-batch that the data set gives (stream_source.py). One thread
reads them and keeps each as a frame: a skeleton and the memory of its tensors (frames.py). This
module must not know who asks, nor why.
"""

import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeAlias

import torch

from .frames import Frame, encode

_PROGRESS_S = 10.0
_GONE = "the DataLoader worker that read it is gone"
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


# -- one pass --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Over:
    """The pass has only ``end`` mini-batches, and not this one."""

    end: int


@dataclass(frozen=True, slots=True)
class Gone:
    """An update has already used this mini-batch."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The stream cannot be read; ``text`` says why."""

    text: str


Answer: TypeAlias = Frame | Over | Gone | Broken
News: TypeAlias = tuple[int, str] | Over | Broken | str


@dataclass(frozen=True, slots=True)
class Extent:
    """Which mini-batches of a pass to read and to keep.

    Attributes:
        first, done: the first number that is needed, and the later ones that are not.
        number: the number of the first mini-batch that the data set will give.
        most_ahead: at most this many mini-batches are kept that nobody has requested.
        multiple: the pass ends at a multiple of this; 1: where the data set ends.
    """

    epoch: int
    first: int
    done: tuple[int, ...]
    number: int
    most_ahead: int
    multiple: int = 1


class StreamReading:
    """One pass, read by one thread a bounded number of mini-batches ahead of requests from others.

    Args:
        news: called with what to report to the run: (number, state), ``Over``, or a sentence.

    Invariant: at most ``most_ahead`` mini-batches are kept that nobody has requested, unless a
    later one is waited for (tests/data/test_stream.py).
    """

    def __init__(self, extent: Extent, news: Callable[[News], object]) -> None:
        self.extent = extent
        self._news = news
        self._changed = threading.Condition()
        self._kept: dict[int, Frame] = {}
        self._unasked: set[int] = set()
        self._waiting: list[int] = []
        self._first, self._done = extent.first, set(extent.done)
        self._next = extent.number
        """The number of the next mini-batch to read."""
        self._last: Over | Broken | None = None
        self._is_stopped = False

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def answer(self, number: int) -> Answer | None:
        """Wait for this mini-batch and return it; None: the reading was stopped."""
        with self._changed:
            self._waiting.append(number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stopped or self._find(number) is not None)
            self._waiting.remove(number)
            self._unasked.discard(number)
            self._changed.notify_all()
            return None if self._is_stopped else self._find(number)

    def done_with(self, first: int, others: Sequence[int]) -> None:
        """Drop the mini-batches below ``first``, and ``others``: nobody needs them any more."""
        with self._changed:
            self._first = max(self._first, first)
            self._done = {number for number in (*self._done, *others) if number >= self._first}
            for number in [number for number in self._kept if self._is_done(number)]:
                del self._kept[number]
                self._unasked.discard(number)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the pass and drop all that is kept."""
        with self._changed:
            self._is_stopped = True
            self._kept.clear()
            self._changed.notify_all()

    def wait_for_stop(self) -> None:
        """Block until ``stop`` is called."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped)

    def _is_done(self, number: int) -> bool:
        return number < self._first or number in self._done

    def _find(self, number: int) -> Answer | None:
        if self._is_done(number):
            return Gone()
        if (frame := self._kept.get(number)) is not None and number < self._num_given():
            return frame
        if self._last is None or (isinstance(self._last, Over) and number < self._last.end):
            return None
        return self._last

    def _num_given(self) -> int:
        """How many are certain to be part of the pass: later ones may be a remainder left out."""
        return self._next - self._next % self.extent.multiple

    # -- reading --------------------------------------------------------------------------------

    def read(self, open_: Callable[[], Iterable[tuple[int, Any, str]]]) -> None:
        """Read all mini-batches; returns at the end of the stream, or after ``stop``."""
        last: Over | Broken
        progress_s, number = time.monotonic() + _PROGRESS_S, self._next
        try:
            for num_samples, batch, state in open_():
                frame = None if self._is_done(number) else encode(num_samples, batch)
                number += 1
                if state and number >= self._first:
                    self._news((number, state))
                if number < self._first and time.monotonic() >= progress_s:
                    self._news(f"reading the stream again: skipped {number:,} of {self._first:,}")
                    progress_s = time.monotonic() + _PROGRESS_S
                self._add(number, frame)
                if self._is_stopped:
                    return
            last = self._end(number)
        except Exception as error:  # the user's data set may raise anything; clients are told
            last = Broken(explain(error))
        self._news(last)
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def _end(self, number: int) -> Over | Broken:
        end = number - number % self.extent.multiple
        if end:
            return Over(end)
        what = f"whole batch ({number} mini-batches, drop_last=True)" if number else "mini-batches"
        return Broken(f"the stream of pass {self.extent.epoch + 1} has no {what}")

    def _add(self, number: int, frame: Frame | None) -> None:
        """Keep a mini-batch, and wait until more are wanted."""
        with self._changed:
            if frame is not None and not (self._is_stopped or self._is_done(number - 1)):
                self._kept[number - 1] = frame
                self._unasked |= {number - 1} - set(self._waiting)
            self._next = number
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stopped or self._wants_more())

    def _wants_more(self) -> bool:
        if len(self._unasked) < self.extent.most_ahead:
            return True
        given = self._num_given()
        return any(number >= given and not self._is_done(number) for number in self._waiting)


def explain(error: Exception) -> str:
    """Why a stream cannot be read any further, with the user's own frames if there are any."""
    text = str(error)
    lines = [line for line in text.strip().splitlines() if line.strip()]
    raised = [
        (frame.filename, str(frame.lineno), frame.name) for frame in extract_tb(error.__traceback__)
    ]
    quoted = _FRAME.findall(text)  # the traceback of one of torch's loader workers
    own = [frame for frame in (quoted or raised) if not frame[0].startswith(_FOREIGN)]
    if not own:
        reason = lines[0] if lines else type(error).__name__
        if isinstance(error, OSError | EOFError):  # half a mini-batch, or its memory is gone
            reason = f"{_GONE} ({reason})"
        return f"the stream cannot be read any further: {reason}"
    reason = lines[-1] if quoted else f"{type(error).__name__}: {lines[-1] if lines else ''}"
    file, line, name = own[-1]
    return "\n".join([
        f"the stream cannot be read any further: {reason}, at {file}:{line} in {name}",
        *(f"  {Path(path).name}:{number} {function}" for path, number, function in own[-3:]),
    ])  # fmt: skip


def explain_end(exit_code: int | None) -> str:
    """Why a stream cannot be read any further whose reading process has ended."""
    cause = f"exit {exit_code}"
    if exit_code is not None and exit_code < 0:
        cause = f"killed by {signal.Signals(-exit_code).name}"
    return f"the stream cannot be read any further: {_GONE} ({cause})"
