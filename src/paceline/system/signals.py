"""Signals that stop a run: softly at first, at once when they are repeated; and who hears them.

The launcher alone does. A batch system sends them to every process of a run, so those that the
launcher begins hear none, from their first moment on:

    with held_back(): begin  -->  blocked until it says leave_to_the_launcher()  -->  ignored

This module must not know what a run is.
"""

import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

REASONS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "interrupted: terminated",
    signal.SIGUSR1: "interrupted: the batch system asked for it",
    signal.SIGHUP: "interrupted: its terminal is gone",
}
"""What stops a run softly, and what its trace then says. A batch system sends USR1 some time before
it kills a job (Slurm: --signal=B:USR1@60), so to go on would be to lose what comes after. HUP stops
nobody who was begun with it ignored (nohup)."""
_SAME_S = 0.2
"""Nobody asks twice within it: ``timeout`` sends a signal to its child and then to its group."""
_PR_SET_PDEATHSIG = 1


class SignalInterrupt(KeyboardInterrupt):
    """A signal ended the run; Ctrl-C is one of them.

    Args:
        number: which.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


@contextmanager
def ended_by_signals(stop_softly: Callable[[int], bool]) -> Iterator[None]:
    """Ctrl-C, TERM, USR1 or HUP asks for a soft stop; where there is none, it ends everything now.

    Args:
        stop_softly: stops at the next step border; False where that is asked for already, or
            nothing has started yet.
    """
    heard_s: dict[int, float] = {}

    def interrupt(number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - heard_s.get(number, -math.inf) < _SAME_S:
            return
        heard_s[number] = now_s  # of those that count: a key that is held down ends all, too
        if not stop_softly(number):
            raise SignalInterrupt(number)

    old = {}
    try:
        for number in REASONS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                old[number] = signal.signal(number, interrupt)
    except ValueError:  # not in the main thread: somebody else hears signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def hear_alone(numbers: Iterable[int], hear: Callable[[int, FrameType | None], None]) -> None:
    """Hear these signals from now on, in this process and in none that it forks.

    A fork would hear them for nobody: ``Process.terminate()`` and a pool's end wait for it to die.
    One that comes in its first moment waits until that is settled.
    """
    before = {number: signal.signal(number, hear) for number in numbers}
    for number in before:
        signal.siginterrupt(number, False)  # else a library's read or wait fails
    own = threading.local()

    def hold_back() -> None:
        own.mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def let_come() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, own.mask)

    def take_back() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is hear:  # else the script has another by now
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        let_come()

    os.register_at_fork(before=hold_back, after_in_parent=let_come, after_in_child=take_back)


@contextmanager
def held_back() -> Iterator[None]:
    """A process that begins in here hears none of them; this one hears them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REASONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_launcher() -> None:
    """This process was begun by a launcher, which decides when the run ends."""
    for number in REASONS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REASONS)


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
"""Found in advance: who calls it between fork and exec may look for nothing."""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Get this signal when the thread that began this process ends; Linux only.

    It holds through exec: given to ``Popen`` as ``preexec_fn``, who is stopped before its first
    line dies, too.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
