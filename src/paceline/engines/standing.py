"""Where in its program a member is, asked from outside while it hangs.

    launcher --signal--> member: its frames, written by a handler in C --> file --> words

The handler runs also while other C code holds the interpreter's lock, so a member that hangs in a
library still shows the line that called it; a stopped process runs nothing, and the kernel says
so. This module must not know why somebody asks.
"""

import faulthandler
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (9 if hasattr(signal, "SIGRTMIN") else 0)
"""One that neither the C library nor batch systems use."""
_ANSWER_S = 0.3
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>\S+)')
_STATES = {
    "D": "it waits in the kernel, for a disk or a network file system",
    "Z": "it has just ended",
}


class Standing:
    """What one member shows of itself.

    Attributes:
        pid: of the member, 0 before it is known.
        fd: the descriptor that the member gets for `show_standing`.
    """

    def __init__(self) -> None:
        self.pid = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 closed with the member
        self.fd = self._file.fileno()
        self._seen = 0

    def describe(self) -> str:
        """Where it is: ``it is at data.py:88 in __getitem__``; asks and waits a moment."""
        state = _state(self.pid)
        if state in ("T", "t"):
            return f"it is stopped (kill -CONT {self.pid} lets it go on)"
        if state in _STATES:
            return _STATES[state]
        frames = self._ask() if self.pid else []
        if not frames:
            return "it does not answer"
        file, line, name = next((one for one in frames if not is_foreign(one[0])), frames[0])
        return f"it is at {Path(file).name}:{line} in {name}"

    def _ask(self) -> list[tuple[str, str, str]]:
        """Its frames, innermost first."""
        try:
            os.kill(self.pid, _SIGNAL)
        except (ProcessLookupError, PermissionError):
            return []
        end_s = time.monotonic() + _ANSWER_S
        text, before = b"", b"?"
        while time.monotonic() < end_s and not (text and text == before):
            time.sleep(0.01)
            text, before = os.pread(self.fd, 1 << 16, self._seen), text
        self._seen += len(text)
        return [
            (one["file"], one["line"], one["name"])
            for one in _FRAME.finditer(text.decode(errors="replace"))
        ]

    def close(self) -> None:
        self._file.close()


def show_standing(descriptor: int) -> None:
    """In a member: answer the question where it is, on this descriptor, from now on."""
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=False)


def is_foreign(filename: str) -> bool:
    """Whether a frame is of Paceline, of Python or of an installed package: not the user's."""
    here = str(Path(__file__).parent.parent)
    return filename.startswith((here, "<frozen", sys.base_prefix)) or "site-packages" in filename


def _state(pid: int) -> str:
    """The kernel's letter for what a process does; empty where nobody knows."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
