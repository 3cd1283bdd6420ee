"""What the main worker does before all others: filling the store, and ``pace.once()``.

    LAYOUT   0 --- weights as prepared ---> 1 --- as the script left them before its loop ---> 2
             all others wait in prepare     |                all others wait in the first epoch

    main:    enter ------ block ------ exit -> the word counts one more block
    others:  enter .......... wait ......... woken: block

The main worker of the moment does all of it: what a dead one left half done is done again.

    stretch 0    | epoch 0 | stretch 2    | epoch 1 | stretch 4   ...   stretch 2 n + 1, or THE_END
    block 1, 2   |         | block 1, 2   |         | block 1           after the loop of n epochs

Blocks are counted, so members may reach them at any time. Each stretch of the script counts from 1:
a member that joins later never reaches the blocks between earlier epochs, and skips those before
its first epoch that were done. This module must not know what weights are good for, nor what a
block does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..store.control import INSIDE, LAYOUT, ONCE, SKIPPED, VERSION, Control
from ..store.versions import LossScale
from .base import State
from .inbox import POLL_S, Inbox
from .model_copy import ModelCopy

THE_END = 1 << 30
"""The stretch after the loop of a run that was stopped, in any epoch."""
_BLOCKS = 1 << 24
"""More than a stretch has."""


class Beginning:
    """One member's part in filling the store.

    Args:
        copy: its model, and the store with its updaters, which are renewed if state was loaded.
        version: that the run begins with; not 0 for a resumed run.
        beat: gives a sign of life: a member that waits does not hang.
        is_part: whether each member has a part of the model, and lays it out by itself.
    """

    def __init__(
        self,
        copy: ModelCopy,
        mail: Inbox,
        version: int,
        beat: Callable[[], None],
        *,
        is_part: bool = False,
    ) -> None:
        self._copy, self._store, self._control = copy, copy.store, copy.store.control
        self._mail, self._version, self._beat = mail, version, beat
        self._is_part = is_part

    def lay_out(self, scale: LossScale | None, num_skipped: int) -> None:
        """Put parameters and state into the store, once; return when they are there.

        Args:
            scale: the loss scale of a resumed run.
            num_skipped: updates up to its version that changed nothing.
        """
        control, version = self._control, self._version

        def write() -> None:
            control[VERSION] = 2 * version
            if scale is not None:
                self._store.scales.begin(version, scale)
            control[SKIPPED[version & 1]] = num_skipped
            self._write(self._copy.rule.state)

        self._reach(1, write)

    def settle(self, loaded: State | None) -> None:
        """Store what the script changed since; a resumed run begins as it was saved.

        Args:
            loaded: the optimizer's state that the script loaded since.
        """

        def write() -> None:
            if self._version:
                return
            if loaded is not None:
                self._copy.renew_updaters()
            self._write(loaded)

        self._reach(2, write)

    def _write(self, state: State | None) -> None:
        store, copy = self._store, self._copy
        copy.replica.write_to(store.blocks[store.current])
        if state is not None:
            copy.updaters[store.current].write_state(state)

    def _reach(self, stage: int, write: Callable[[], None]) -> None:
        control = self._control
        while control[LAYOUT] < stage:
            if self._is_part:
                write()
                control[LAYOUT] = stage
            elif self._mail.is_main:
                write()
                control.set_and_wake(LAYOUT, stage)
            elif not control.wait_while(LAYOUT, lambda value: value < stage, POLL_S):
                self._beat()
                self._mail.do_jobs()  # this member may be told that it is the main one now


class Turns:
    """The blocks of one member.

    Args:
        is_main: returns whether this member is the main one now.
        look: called while it waits: gives signs of life and does jobs.
        tell: reports that it waits for the main member, or no longer.
    """

    def __init__(
        self,
        control: Control,
        seat: int,
        is_main: Callable[[], bool],
        look: Callable[[], None],
        tell: Callable[[bool], None],
    ) -> None:
        self._control = control
        self._seat = seat
        self._is_main = is_main
        self._look, self._tell = look, tell
        self._entered = 0
        """_BLOCKS times the stretch, plus the blocks entered in it."""

    def come_to(self, stretch: int) -> None:
        """Count blocks from this stretch on, unless the script is further already."""
        self._entered = max(self._entered, stretch * _BLOCKS)

    @contextmanager
    def once(self) -> Iterator[bool]:
        """Enter the next block; yield True to the first member. It counts even if it raises."""
        self._entered += 1
        is_first = self._wait(self._entered)
        if is_first:
            self._control[INSIDE] = self._seat + 1
        try:
            yield is_first
        finally:
            if is_first:
                self._control[INSIDE] = 0
                self._control.set_and_wake(ONCE, self._entered)

    def _wait(self, number: int) -> bool:
        """Wait; return whether this member goes first through this block, or another has.

        The main member's script may be over; then this one becomes the main one.
        """
        control, is_told = self._control, False
        try:
            while control[ONCE] < number:
                if self._is_main():
                    return True
                self._look()
                is_done = control.wait_while(
                    ONCE, lambda done: done < number, POLL_S, is_soon=False
                )
                if not (is_done or is_told):
                    is_told = True
                    self._tell(True)
            return False
        finally:
            if is_told:
                self._tell(False)
