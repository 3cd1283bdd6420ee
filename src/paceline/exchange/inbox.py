"""What a member hears: jobs are done in their turn, all else is handed on in order.

    lane -> [ jobs: duties ] -> queue -> next

A member that waits, for a message or for a version, does the jobs that arrive meanwhile. This
module must not know what a message leads to.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ..wire.channel import Channel
from ..wire.messages import (
    BeMain,
    CountTotals,
    Ending,
    Job,
    Range,
    ShelfMoved,
    Snap,
    Stop,
    Summed,
    ToMember,
)
from .base import Clock, Stopped
from .jobs import JobQueue

T = TypeVar("T", bound=ToMember)
_ANSWERS = (Range, CountTotals, Summed)
"""What is still answered after the run was told to stop, or a newcomer that an epoch is over."""


class Inbox:
    """The messages of one member.

    Args:
        clock: the seconds that waiting takes are added to its ``wait_s``.
        is_main: whether this member prints and saves from the start.
    """

    snap: Callable[[Snap], None]
    """Does what ``Snap`` asks for; set by the session."""
    move: Callable[[ShelfMoved], None]
    """Hears with ``ShelfMoved`` where checkpoints go from now on; set by the session."""

    def __init__(self, lane: Channel, duties: JobQueue, clock: Clock, *, is_main: bool) -> None:
        self._lane = lane
        self._duties = duties
        self._clock = clock
        self._queue: deque[ToMember] = deque()
        self.is_main = is_main
        self.has_stopped = False
        """Whether a stop was taken."""
        self._is_ending = False
        """Whether a stop is on its way."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop has come, be it that it waits behind other messages.

        One that comes as soon as the end of the run is copied is waited for.
        """
        if not self.has_stopped:
            self.look()
            if self._is_ending:
                self.answer(Stop)
        return self.has_stopped or any(isinstance(one, Stop) for one in self._queue)

    def next(self) -> ToMember:
        """The next message that is not a job; jobs that came before it are done first."""
        while True:
            while self._duties:
                self.settle(self._duties.wait)
                self._duties.do_due()
            if self._queue:
                message = self._queue.popleft()
                if isinstance(message, Snap):
                    self.snap(message)
                    continue
                self.has_stopped |= isinstance(message, Stop)
                return message
            start = time.perf_counter()
            self._hear()
            self._clock.wait_s += time.perf_counter() - start

    def expect(self, kind: type[T]) -> T:
        """The next message, which must be of this kind. Raises Stopped: it is not, the run ends.

        What was asked is answered, also where the run or an epoch has ended meanwhile.
        """
        if kind in _ANSWERS:
            return self.answer(kind)
        message = self.next()
        if not isinstance(message, kind):
            raise Stopped
        return message

    def answer(self, kind: type[T]) -> T:
        """The next message of this kind; those before it stay, in order."""
        others = []
        while not isinstance(message := self.next(), kind):
            others.append(message)
        self._queue.extendleft(reversed(others))
        return message

    def look(self) -> None:
        """Take in what has come, without waiting."""
        self._hear(is_blocking=False)

    def do_jobs(self) -> None:
        """Do the jobs whose turn it is, leave every other message for later."""
        self.look()
        self._duties.do_due()

    def do_snaps(self) -> None:
        """Between epochs: copy what is asked for, leave every other message for later."""
        for message in [one for one in self._queue if isinstance(one, Snap)]:
            self._queue.remove(message)
            self.snap(message)

    def settle(self, is_there: Callable[[], bool]) -> None:
        """Wait until ``is_there``, doing jobs that are handed over meanwhile."""
        start = time.perf_counter()
        while not is_there():
            self.do_jobs()
        self._clock.wait_s += time.perf_counter() - start

    def _hear(self, is_blocking: bool = True) -> None:
        """Take in what has come: jobs by their number, all else in order."""
        for message in self._lane.receive(is_blocking):
            if isinstance(message, Job):
                self._duties.take(message)
            elif isinstance(message, BeMain):
                self.is_main = True
            elif isinstance(message, Ending):
                self._is_ending = True
            elif isinstance(message, ShelfMoved):
                self.move(message)
            else:
                self._queue.append(message)
