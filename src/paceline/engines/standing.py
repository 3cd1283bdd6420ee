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

from ..vitals import State, catches, read_vitals

_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (9 if hasattr(signal, "SIGRTMIN") else 0)
"""One that neither the C library nor batch systems use."""
_ANSWER_S = 0.3
_MOST_ASKED, _BETWEEN_LINES = 3, "???"
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>\S+)')


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

    def describe(self, does: str = "is") -> str:
        """Where it is: ``it sleeps at data.py:88 in __getitem__``; asks and waits a moment.

        Args:
            does: what it does there.
        """
        vitals = read_vitals(self.pid)
        if vitals.state is State.STOPPED:
            return f"it is stopped (kill -CONT {self.pid} lets it go on)"
        if vitals.state is State.TRACED:
            return f"process {vitals.tracer} traces it"
        if vitals.state is State.DISK:
            return str(State.DISK.value)
        if vitals.state is State.ENDED:
            return "it has just ended"
        for _ in range(_MOST_ASKED):
            frames = self._ask() if self.pid and catches(self.pid, _SIGNAL) else []
            if not frames:
                return "it does not answer" if does == "is" else f"it {does}, and does not answer"
            file, line, name = next((one for one in frames if not is_foreign(one[0])), frames[0])
            if line != _BETWEEN_LINES:
                break
        return f"it {does} at {Path(file).name}:{line} in {name}"

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
