"""Blocks that one member goes through before all others: ``pace.once()``.

    main:    enter ------ block ------ exit -> the word counts one more block
    others:  enter .......... wait ......... woken: block

    the main one dies inside: the next main one finds the word as it was, and goes first

Blocks are counted, so members may come by at any time, and one that joins later goes through what
was gone through. This module must not know what is done inside a block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..store.control import INSIDE, ONCE, Control
from .jobs import POLL_S


class Turns:
    """The blocks of one member.

    Args:
        is_main: whether this member is the main one by now.
        look: called while it waits: signs of life, and jobs that are handed over.
    """

    def __init__(
        self, control: Control, seat: int, is_main: Callable[[], bool], look: Callable[[], None]
    ) -> None:
        self._control = control
        self._seat = seat
        self._is_main = is_main
        self._look = look
        self._num_entered = 0

    @contextmanager
    def once(self) -> Iterator[bool]:
        """The next block; True for who goes first. It counts as done also when it raises."""
        self._num_entered += 1
        is_first = self._wait(self._num_entered)
        if is_first:
            self._control[INSIDE] = self._seat + 1
        try:
            yield is_first
        finally:
            if is_first:
                self._control[INSIDE] = 0
                self._control.set_and_wake(ONCE, self._num_entered)

    def _wait(self, number: int) -> bool:
        """Whether this member goes first through block ``number``; else somebody has."""
        while self._control[ONCE] < number:
            if self._is_main():
                return True
            self._look()
            self._control.wait_while(ONCE, lambda done: done < number, POLL_S, is_soon=False)
        return False
