"""A stream that is read once for all workers of a machine: its mini-batches by number, kept.

    the user's data set -> a loader worker, m samples, collate -> Reading -> whoever asks
                                                                    |
      first needed           handed out, kept          read ahead   |  to come
      .......|--------------------------------------|--------------|.......
             until an update has used them             at most so many

Number n of a pass is the n-th mini-batch that the data set gives (stream_source.py). One thread
reads them and keeps each as its skeleton and the memory of its tensors, as they are to be handed on
(frames.py). This module must not know who asks, nor why.
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

_SAY_S = 10.0
_GONE = "a DataLoader worker that read it is gone"
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


# -- one pass --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Over:
    """There is no such mini-batch: the pass has ``end`` of them."""

    end: int


@dataclass(frozen=True, slots=True)
class Gone:
    """An update has used it already."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The stream cannot be read, and why."""

    text: str


Answer: TypeAlias = Frame | Over | Gone | Broken
News: TypeAlias = tuple[int, str] | Over | Broken | str


@dataclass(frozen=True, slots=True)
class Extent:
    """Of what a reading gives.

    Attributes:
        first, done: number of the first mini-batch that is needed, and those after it that are not.
        number: of the first that the data set will give.
        most_ahead: mini-batches read that nobody has asked for, at most.
        multiple: the pass ends at a multiple of this; 1: wherever the data set does.
    """

    epoch: int
    first: int
    done: tuple[int, ...]
    number: int
    most_ahead: int
    multiple: int = 1


class StreamReading:
    """One pass, read by one thread a bounded way ahead of those who ask in others.

    Args:
        news: is given what the run should hear: (number, state), ``Over``, or a sentence.

    Invariant: at most ``most_ahead`` mini-batches are kept that nobody has asked for, unless
    somebody waits for a later one (tests/data/test_stream.py).
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
        """Of the mini-batch to be read."""
        self._last: Over | Broken | None = None
        self._is_stopped = False

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def answer(self, number: int) -> Answer | None:
        """The mini-batch of this number, once it is read; None: the reading was stopped."""
        with self._changed:
            self._waiting.append(number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stopped or self._found(number) is not None)
            self._waiting.remove(number)
            self._unasked.discard(number)
            self._changed.notify_all()
            return None if self._is_stopped else self._found(number)

    def done_with(self, first: int, others: Sequence[int]) -> None:
        """Nobody needs those below ``first`` any more, nor these."""
        with self._changed:
            self._first = max(self._first, first)
            self._done = {one for one in (*self._done, *others) if one >= self._first}
            for number in [one for one in self._kept if self._is_done(one)]:
                del self._kept[number]
                self._unasked.discard(number)
            self._changed.notify_all()

    def stop(self) -> None:
        """The pass is over: nothing is kept any more."""
        with self._changed:
            self._is_stopped = True
            self._kept.clear()
            self._changed.notify_all()

    def wait_for_stop(self) -> None:
        """Until somebody has called ``stop``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped)

    def _is_done(self, number: int) -> bool:
        return number < self._first or number in self._done

    def _found(self, number: int) -> Answer | None:
        if self._is_done(number):
            return Gone()
        if (frame := self._kept.get(number)) is not None and number < self._num_given():
            return frame
        if self._last is None or (isinstance(self._last, Over) and number < self._last.end):
            return None
        return self._last

    def _num_given(self) -> int:
        """Those after it may be a rest that is left out: nobody knows before more is read."""
        return self._next - self._next % self.extent.multiple

    # -- who reads ------------------------------------------------------------------------------

    def read(self, open_: Callable[[], Iterable[tuple[int, Any, str]]]) -> None:
        """All mini-batches: returns when there are no more, or after ``stop``."""
        last: Over | Broken
        say_s, number = time.monotonic() + _SAY_S, self._next
        try:
            for num_samples, batch, state in open_():
                frame = None if self._is_done(number) else encode(num_samples, batch)
                number += 1
                if state and number >= self._first:
                    self._news((number, state))
                if number < self._first and time.monotonic() >= say_s:
                    self._news(f"the stream is read again: {number:,} of {self._first:,} passed")
                    say_s = time.monotonic() + _SAY_S
                self._add(number, frame)
                if self._is_stopped:
                    return
            last = self._end(number)
        except Exception as error:  # the user's data set may raise anything; whoever waits is told
            last = Broken(explain(error))
        self._news(last)
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def _end(self, number: int) -> Over | Broken:
        end = number - number % self.extent.multiple
        if end:
            return Over(end)
        rest = f" whole ones ({number} mini-batches, and drop_last=True)" if number else ""
        return Broken(f"the stream of pass {self.extent.epoch + 1} has no mini-batches{rest}")

    def _add(self, number: int, frame: Frame | None) -> None:
        """Keep what was read, and wait until more is wanted."""
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
    """Why a stream cannot be read on: the user's own frames, where there are any."""
    text = str(error)
    lines = [line for line in text.strip().splitlines() if line.strip()]
    traced = [(one.filename, str(one.lineno), one.name) for one in extract_tb(error.__traceback__)]
    told = _FRAME.findall(text)  # by a loader worker of torch's
    own = [one for one in (told or traced) if not one[0].startswith(_FOREIGN)]
    if not own:
        what = lines[0] if lines else type(error).__name__
        if isinstance(error, OSError | EOFError):  # half a mini-batch, or the way to its memory
            what = f"{_GONE} ({what})"
        return f"the stream cannot be read on: {what}"
    said = lines[-1] if told else f"{type(error).__name__}: {lines[-1] if lines else ''}"
    file, line, name = own[-1]
    return "\n".join([
        f"the stream cannot be read on: {said}, at {file}:{line} in {name}",
        *(f"  {Path(path).name}:{at} {where}" for path, at, where in own[-3:]),
    ])  # fmt: skip


def explain_end(exit_code: int | None) -> str:
    """Why a stream cannot be read on whose reading process has ended in the middle."""
    how = f"exit {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f"killed by {signal.Signals(-exit_code).name}"
    return f"the stream cannot be read on: {_GONE} ({how})"
