"""Where in its program a member is, asked from outside while it hangs.

    launcher --signal--> member: between two instructions of Python    --> file --> words
             --signal-->         no answer: by a handler in C, at once

The second runs also while other C code holds the interpreter's lock, so a member that hangs in a
library still shows the line that called it. But frames that change while they are read end a
process: one in some hundred that computes in Python would die of the question. So it is asked only
where the first was heard and no frame can change: the thread sleeps, or has used the processor
since without coming back from C. A stopped process runs nothing, and the kernel says so. By a third
signal a member that is busy by itself is asked to look what there is to do. What its last error
says is read here, too. This module must not know why somebody asks.
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
"""From here on neither the C library nor batch systems use one."""
_WHERE = signal.SIGUSR2 if _FIRST is None else _FIRST
"""The one that Python answers."""
_WHERE_IN_C = None if _FIRST is None else _FIRST + 1
_HURRY = None if _FIRST is None else _FIRST + 2
"""The one by which a member is asked to look what there is to do."""
_HALF_DONE = os.path.join("torch", "optim")
"""In there schedulers and optimizers are between two states."""
_PACKAGE = Path(__file__).parents[2]
_NOT_A_USERS = (f"{_PACKAGE}{os.sep}", f"{os.path.dirname(os.__file__)}{os.sep}", "<frozen")
"""How names of files of Paceline's and Python's own begin. Scripts may lie below Python's prefix:
of a system's Python that is /usr, and images work in /usr/src."""
_INSTALLED = ("site-packages", "dist-packages")
_TRACED = "Traceback (most recent call last):"
_TRACED_FRAME = re.compile(r'  File "(.+?)", line (\d+), in (\S+)')
_CALLS = (os.path.join("local", "process.py"), os.path.join("system", "interpreter.py"))
_IS_SCRIPT = "trainer.py"
"""Files of Paceline's own: those that call a script, and one that is as good as a script."""
_ANSWER_S = 0.3
_IN_C_S = 0.05
"""Seconds of the processor: Python comes to its next instruction in less."""
_MOST_ASKED, _BETWEEN_LINES = 3, "???"
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>\S+)')

_OF_EMPTY = (ValueError, TypeError, IndexError, RuntimeError)
_EMPTY = re.compile(r"\b(non-)?empty\b|at least (one|two)|, got 0\)|raised StopIteration")
"""What Python, NumPy and torch say of a list that has nothing in it; a generator of ``next``."""


class StackProbe:
    """What one member shows of itself.

    Attributes:
        pid: of the member, 0 before it is known.
        fd: the descriptor that the member gets for `show_standing`.
    """

    def __init__(self) -> None:
        self.pid = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 closed with the member
        self.fd = self._file.fileno()

    def describe(self, does: str = "is") -> str:
        """Where it is: ``it sleeps at data.py:88 in __getitem__``; asks and waits a moment.

        Args:
            does: what it does there.
        """
        vitals = read_vitals(self.pid)
        if self._file.closed or vitals.state is ProcessState.ENDED:
            return "it has just ended"
        if vitals.state is ProcessState.STOPPED:
            return f"it is stopped (kill -CONT {self.pid} lets it go on)"
        if vitals.state is ProcessState.TRACED:
            return f"process {vitals.tracer} traces it"
        if vitals.state is ProcessState.DISK:
            return str(ProcessState.DISK.value)
        for _ in range(_MOST_ASKED):
            frames = self._ask()
            if not frames:
                return "it does not answer" if does == "is" else f"it {does}, and does not answer"
            file, line, name = next((one for one in frames if not is_foreign(one[0])), frames[0])
            if line != _BETWEEN_LINES:
                break
        return f"it {does} at {Path(file).name}:{line} in {name}"

    def _ask(self) -> list[tuple[str, str, str]]:
        """Its frames, innermost first."""
        before = read_thread(self.pid)
        text = self._answer(_WHERE)
        if not text and _WHERE_IN_C is not None:
            now = read_thread(self.pid)
            if now.is_asleep or now.cpu_s >= before.cpu_s + _IN_C_S:
                text = self._answer(_WHERE_IN_C)
        return [(one["file"], one["line"], one["name"]) for one in _FRAME.finditer(text)]

    def _answer(self, number: int) -> str:
        """What it says to this signal, in a moment; "": nothing."""
        seen = 0 if self._file.closed else os.fstat(self.fd).st_size  # of questions before
        if not self._send(number):
            return ""
        end_s = time.monotonic() + _ANSWER_S
        text, before = b"", b"?"
        while time.monotonic() < end_s and not (text and text == before):
            time.sleep(0.01)
            text, before = os.pread(self.fd, 1 << 16, seen), text
        return text.decode(errors="replace")

    def _send(self, number: int) -> bool:
        """Whether there is a member that this signal does not end."""
        if not self.pid or self._file.closed or not catches(self.pid, number):
            return False
        try:
            os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def hurry(self) -> None:
        """Let it look what there is to do, where its script's own code runs."""
        if _HURRY is not None:
            self._send(_HURRY)

    def close(self) -> None:
        """It has ended; may be called twice."""
        self._file.close()


def show_standing(descriptor: int) -> None:
    """In a member's main thread: answer where it is, on this descriptor, from now on."""

    def answer(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=descriptor, all_threads=False)

    signal.signal(_WHERE, answer)
    signal.siginterrupt(_WHERE, False)  # else a library's read or wait fails
    if _WHERE_IN_C is not None:
        faulthandler.register(_WHERE_IN_C, file=descriptor, all_threads=False)


def look_when_hurried(look: Callable[[], None]) -> None:
    """In a member: ``look`` when it is asked to, between two lines of the script's own code.

    Python calls a handler between two of its instructions, in the main thread. Where that is inside
    Paceline nothing is done: it looks by itself, or soon returns, and is asked again.
    """

    def hear(number: int, frame: FrameType | None) -> None:
        if _is_in_own_code(frame):
            with contextlib.suppress(OSError):  # the launcher may be gone
                look()

    if _HURRY is not None:
        signal.signal(_HURRY, hear)


def _is_in_own_code(frame: FrameType | None) -> bool:
    here = str(_PACKAGE) + os.sep
    while frame is not None:
        name = frame.f_code.co_filename
        if _HALF_DONE in name:
            return False
        if name.startswith(here) and not name.endswith(_IS_SCRIPT):
            return name.endswith(_CALLS)
        frame = frame.f_back
    return True


def is_foreign(filename: str) -> bool:
    """Whether a frame is of Paceline, of Python or of an installed package: not the user's."""
    return filename.startswith(_NOT_A_USERS) or any(one in filename for one in _INSTALLED)


def end_of_traceback(text: str) -> list[str]:
    """Of an error that tells of another process by its traceback: which one, where, and what.

    ``torch.multiprocessing.spawn`` and a DataLoader's workers tell so; empty: it tells of none.
    """
    head, is_told, traced = text.rpartition(_TRACED)
    if not is_told:
        return []
    rows = traced.splitlines()
    frames = [(found, at) for at, row in enumerate(rows) if (found := _TRACED_FRAME.match(row))]
    own = [found for found, _ in frames if not is_foreign(found[1])] or [one for one, _ in frames]
    after = rows[frames[-1][1] + 1 :] if frames else rows
    said = next((row for row in after if row.strip() and not row.startswith(" ")), "")
    which = next((row for row in head.splitlines() if row.strip()), "")
    place = [f"at {one[1]}:{one[2]} in {one[3]}" for one in own[-1:]]
    return [which.strip(), *place, *([said] if said else [])]


def lacks_batches(error: Exception) -> bool:
    """Whether a script has failed for want of batches, behind a stop that left its loader empty.

    A loop over nothing binds no name, adds nothing up, fills no list, and ``next`` finds no batch:
    code that cannot do without fails then. Whatever may be another error is none of these.
    """
    if isinstance(error, NameError):
        return isinstance(error, UnboundLocalError) or _is_bound_somewhere(error)
    if isinstance(error, AttributeError):  # total = 0; total += loss; total.item()
        return type(error.obj) in (int, float) and not error.obj
    if isinstance(error, StopIteration | ZeroDivisionError):
        return True
    return isinstance(error, _OF_EMPTY) and _EMPTY.search(str(error)) is not None


def _is_bound_somewhere(error: NameError) -> bool:
    """Whether code that was at work binds this name, as a loop may; else it is misspelt."""
    return any(
        one.opname.startswith("STORE_") and one.argval == error.name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for one in dis.get_instructions(frame.f_code)
    )
