"""Finds out from outside which line of its program a member is at, also while it hangs.

    launcher --signal--> member: a Python handler, between two instructions --> file --> text
             --signal-->         no answer: a handler in C, at once

The C handler also runs while other C code holds the GIL, so a member that hangs in a library still
shows the line that called it. But reading frames while they change crashes a process: about one in
a hundred that compute in Python. So the second signal is sent only if the first got no answer and
no frame can change: the thread sleeps, or has used CPU time since without returning from C. A
stopped process runs no handler; the kernel reports its state. A third signal asks a member that
runs the script's own code to check for work. Tracebacks in a script's last error are parsed here,
too. This module must not know why a member is asked.
"""

import contextlib
import dis
import faulthandler
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ...system.vitals import ProcessState, catches, read_thread, read_vitals

_FIRST = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
"""Neither the C library nor batch systems use signals from this number on."""
_WHERE = signal.SIGUSR2 if _FIRST is None else _FIRST
"""The signal with a Python handler."""
_WHERE_IN_C = None if _FIRST is None else _FIRST + 1
_HURRY = None if _FIRST is None else _FIRST + 2
"""The signal that asks a member to check for work."""
_UNSAFE_FOLDER = os.path.join("torch", "optim")
"""Schedulers and optimizers in this folder may be in the middle of a state change."""
_PACKAGE = Path(__file__).parents[2]
_FOREIGN_PREFIXES = (f"{_PACKAGE}{os.sep}", f"{os.path.dirname(os.__file__)}{os.sep}", "<frozen")
"""Prefixes of Paceline's and Python's own files. Scripts may be below Python's prefix: a system's
Python has /usr, and containers often work in /usr/src."""
_INSTALLED = ("site-packages", "dist-packages")
_TRACEBACK_HEAD = "Traceback (most recent call last):"
_TRACEBACK_FRAME = re.compile(r'  File "(.+?)", line (\d+), in (\S+)')
_CALLERS = (os.path.join("local", "process.py"), os.path.join("system", "interpreter.py"))
"""Files of Paceline that call a script."""
_TASK_LOOP = "trainer.py"
"""The file of Paceline that takes the place of a script."""
_ANSWER_S = 0.3
_IN_C_S = 0.05
"""Seconds of CPU time: Python reaches its next instruction in less."""
_MAX_REQUESTS, _BETWEEN_LINES = 3, "???"
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>\S+)')

_EMPTY_ERRORS = (ValueError, TypeError, IndexError, RuntimeError)
_EMPTY = re.compile(r"\b(non-)?empty\b|at least (one|two)|, got 0\)|raised StopIteration")
"""Words in the errors of Python, NumPy and torch about an empty list; or about ``next``."""


class StackProbe:
    """Finds out where one member is.

    Attributes:
        pid: the member's, 0 before it is known.
        fd: the descriptor that the member passes to `show_standing`.
    """

    def __init__(self) -> None:
        self.pid = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 closed with the member
        self.fd = self._file.fileno()

    def describe(self, does: str = "is") -> str:
        """Wait for its answer and return where it is: ``it sleeps at data.py:88 in __getitem__``.

        Args:
            does: the verb of that sentence.
        """
        vitals = read_vitals(self.pid)
        if self._file.closed or vitals.state is ProcessState.ENDED:
            return "it has just ended"
        if vitals.state is ProcessState.STOPPED:
            return f"it is stopped (kill -CONT {self.pid} continues it)"
        if vitals.state is ProcessState.TRACED:
            return f"process {vitals.tracer} traces it"
        if vitals.state is ProcessState.DISK:
            return str(ProcessState.DISK.value)
        for _ in range(_MAX_REQUESTS):
            frames = self._ask()
            if not frames:
                return "it does not answer" if does == "is" else f"it {does}, and does not answer"
            own = (frame for frame in frames if not is_foreign(frame[0]))
            file, line, name = next(own, frames[0])
            if line != _BETWEEN_LINES:
                break
        return f"it {does} at {Path(file).name}:{line} in {name}"

    def _ask(self) -> list[tuple[str, str, str]]:
        """Return its frames, innermost first."""
        before = read_thread(self.pid)
        text = self._answer(_WHERE)
        if not text and _WHERE_IN_C is not None:
            now = read_thread(self.pid)
            if now.is_asleep or now.cpu_s >= before.cpu_s + _IN_C_S:
                text = self._answer(_WHERE_IN_C)
        return [(match["file"], match["line"], match["name"]) for match in _FRAME.finditer(text)]

    def _answer(self, number: int) -> str:
        """Return its answer to this signal, after up to 0.3 s; "" if there is none."""
        start = 0 if self._file.closed else os.fstat(self.fd).st_size  # after earlier answers
        if not self._send(number):
            return ""
        end_s = time.monotonic() + _ANSWER_S
        text, before = b"", b"?"
        while time.monotonic() < end_s and not (text and text == before):
            time.sleep(0.01)
            text, before = os.pread(self.fd, 1 << 16, start), text
        return text.decode(errors="replace")

    def _send(self, number: int) -> bool:
        """Send a signal; returns False, and sends nothing, if it would end the member."""
        if not self.pid or self._file.closed or not catches(self.pid, number):
            return False
        try:
            os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def hurry(self) -> None:
        """Ask it to check for work, if it runs the script's own code."""
        if _HURRY is not None:
            self._send(_HURRY)

    def close(self) -> None:
        """Close the file once the member has ended; may be called twice."""
        self._file.close()


def show_standing(descriptor: int) -> None:
    """In a member's main thread: from now on write its frames to this descriptor on request."""

    def answer(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=descriptor, all_threads=False)

    signal.signal(_WHERE, answer)
    signal.siginterrupt(_WHERE, False)  # else a library's read or wait fails with EINTR
    if _WHERE_IN_C is not None:
        faulthandler.register(_WHERE_IN_C, file=descriptor, all_threads=False)


def look_when_hurried(look: Callable[[], None]) -> None:
    """In a member: call ``look`` on request, between two lines of the script's own code.

    Python calls a handler between two of its instructions, in the main thread. Inside Paceline's
    code the handler has no effect: that code looks itself, or returns soon and is asked again.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_in_own_code(frame):
            with contextlib.suppress(OSError):  # the launcher may be gone
                look()

    if _HURRY is not None:
        signal.signal(_HURRY, handle)


def _is_in_own_code(frame: FrameType | None) -> bool:
    package = str(_PACKAGE) + os.sep
    while frame is not None:
        name = frame.f_code.co_filename
        if _UNSAFE_FOLDER in name:
            return False
        if name.startswith(package) and not name.endswith(_TASK_LOOP):
            return name.endswith(_CALLERS)
        frame = frame.f_back
    return True


def is_foreign(filename: str) -> bool:
    """Return whether a file is of Paceline, Python or an installed package: not the user's."""
    return filename.startswith(_FOREIGN_PREFIXES) or any(
        folder in filename for folder in _INSTALLED
    )


def end_of_traceback(text: str) -> list[str]:
    """Return process, place and message from an error that quotes another process's traceback.

    ``torch.multiprocessing.spawn`` and a DataLoader's workers raise such errors; empty if there is
    no quoted traceback.
    """
    head, marker, quoted = text.rpartition(_TRACEBACK_HEAD)
    if not marker:
        return []
    rows = quoted.splitlines()
    frames = [(m, index) for index, row in enumerate(rows) if (m := _TRACEBACK_FRAME.match(row))]
    matches = [match for match, _ in frames]
    own = [match for match in matches if not is_foreign(match[1])] or matches
    rest = rows[frames[-1][1] + 1 :] if frames else rows
    message = next((row for row in rest if row.strip() and not row.startswith(" ")), "")
    process = next((row for row in head.splitlines() if row.strip()), "")
    place = [f"at {match[1]}:{match[2]} in {match[3]}" for match in own[-1:]]
    return [process.strip(), *place, *([message] if message else [])]


def lacks_batches(error: Exception) -> bool:
    """Return whether a script failed because a stop left its loader without batches.

    Without a batch a loop binds no name, sums nothing, fills no list, and ``next`` fails, and so
    does code that needs them. An error that may have another cause does not count.
    """
    if isinstance(error, NameError):
        return isinstance(error, UnboundLocalError) or _is_bound_somewhere(error)
    if isinstance(error, AttributeError):  # total = 0; total += loss; total.item()
        return type(error.obj) in (int, float) and not error.obj
    if isinstance(error, StopIteration | ZeroDivisionError):
        return True
    return isinstance(error, _EMPTY_ERRORS) and _EMPTY.search(str(error)) is not None


def _is_bound_somewhere(error: NameError) -> bool:
    """Return whether a function in the traceback binds this name; if none does, it is misspelt."""
    return any(
        instruction.opname.startswith("STORE_") and instruction.argval == error.name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for instruction in dis.get_instructions(frame.f_code)
    )
