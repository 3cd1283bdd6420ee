"""Signals that stop a run: gently at first, at once when repeated.

Only the launcher handles them. A batch system sends them to every process of a run, so processes
that the launcher starts ignore them from the start:

    with held_back(): start  -->  blocked until leave_to_the_launcher() is called  -->  ignored

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
"""Signals that stop a run gently, and the reason for its trace. A batch system sends USR1 some time
before it kills a job (Slurm: --signal=B:USR1@60), so work after it would be lost. HUP is left alone
in a process that was started with it ignored (nohup)."""
_SAME_S = 0.2
"""Repeats within this time count once: ``timeout`` signals its child and then its group."""
_PR_SET_PDEATHSIG = 1


class SignalInterrupt(KeyboardInterrupt):
    """A signal ended the run; Ctrl-C is one of them.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


@contextmanager
def ended_by_signals(stop_softly: Callable[[int], bool]) -> Iterator[None]:
    """Ctrl-C, TERM, USR1 or HUP asks for a gentle stop, or else ends everything now.

    Args:
        stop_softly: stops at the next step boundary; False if a stop was already requested, or
            nothing has started yet.
    """
    heard_s: dict[int, float] = {}

    def interrupt(number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - heard_s.get(number, -math.inf) < _SAME_S:
            return
        heard_s[number] = now_s  # counted repeats only: a key held down also ends the run
        if not stop_softly(number):
            raise SignalInterrupt(number)

    old = {}
    try:
        for number in REASONS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                old[number] = signal.signal(number, interrupt)
    except ValueError:  # not in the main thread, which alone handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def hear_alone(numbers: Iterable[int], hear: Callable[[int, FrameType | None], None]) -> None:
    """Handle these signals from now on, in this process but not in its forks.

    A fork must not handle them: ``Process.terminate()`` and the end of a pool wait for it to die.
    A signal that arrives during the fork is blocked until the handlers are set.
    """
    before = {number: signal.signal(number, hear) for number in numbers}
    for number in before:
        signal.siginterrupt(number, False)  # else a library's read or wait fails with EINTR
    own = threading.local()

    def hold_back() -> None:
        own.mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def let_come() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, own.mask)

    def take_back() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is hear:  # else the script has set its own
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        let_come()

    os.register_at_fork(before=hold_back, after_in_parent=let_come, after_in_child=take_back)


@contextmanager
def held_back() -> Iterator[None]:
    """Block the signals: a process started here gets none, this one gets them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REASONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_launcher() -> None:
    """Ignore the signals: the launcher that started this process decides when the run ends."""
    for number in REASONS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REASONS)


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
"""Looked up in advance, since nothing may be looked up between fork and exec."""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Get this signal when the thread that started this process ends; Linux only.

    It survives exec: passed to ``Popen`` as ``preexec_fn``, it also covers a process that is
    stopped before its first line.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
