"""An end to what may take too long and cannot be asked to stop: a compiler, a first step.

An alarm of the operating system raises in the block. Somebody else's alarm (a test's time-out) goes
on afterwards. This module must not know what is waited for.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class TooLong(BaseException):
    """The block took longer than it may; a BaseException: a compiler's ``except`` lets it by."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TooLong`` in the block after so long; in the main thread only, where it can be."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise TooLong

    old: Callable[..., object] | int | None = signal.signal(signal.SIGALRM, ring)
    start_s = perf_counter()
    others_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old)
        if others_s:  # somebody else's alarm goes on
            left_s = others_s - (perf_counter() - start_s)
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s))
