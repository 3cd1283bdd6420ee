"""Signals that stop a run: softly at first, at once when they are repeated.

This module must not know what a run is.
"""

import signal
from collections.abc import Callable, Iterator
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

    def interrupt(number: int, frame: FrameType | None) -> None:
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
