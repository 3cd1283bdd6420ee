"""Output that may go away (a closed pipe, a terminal, a full disk), and which stream is ready.

Who trains does not end because nobody reads what it says. What the main worker prints is followed
in its log (`Tail`). This module must not know what is said, nor processes.
"""

import errno
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from .files import open_to_read

_GONE = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET, errno.ENXIO}
"""The reader is gone, and does not come back."""


def wait_for(
    readers: Sequence[int], writers: Sequence[int] = (), timeout_s: float | None = None
) -> set[int]:
    """Those descriptors that can be read, or written to, or whose other end is gone.

    As ``select``, which knows only the first 1,024 descriptors of a process.

    Args:
        timeout_s: {} after that; None: waits for as long as it takes.
    """
    poll = select.poll()
    for descriptor in readers:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writers:
        poll.register(descriptor, select.POLLOUT)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


class Lasting:
    """A text stream that raises nothing when what is written cannot be.

    All else is the stream's own. One whose reader is gone leads nowhere from then on, so that what
    others still have in its buffer harms nobody either.

    Args:
        stream: where to write.
        lost: told once why what is written is lost.

    Attributes:
        trouble: why something that was written is lost; empty: nothing is.
    """

    def __init__(self, stream: TextIO, lost: Callable[[str], None] | None = None) -> None:
        self._stream = stream
        self._lost = lost
        self.trouble = ""

    def write(self, text: str) -> int:
        """All of it, as far as anybody could tell."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # a terminal of few letters
            self.write(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError) as error:
            self._fail(error)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._fail(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _fail(self, error: OSError | ValueError) -> None:
        if isinstance(error, OSError) and error.errno in _GONE:
            lead_nowhere(self._stream)
        is_first, self.trouble = not self.trouble, getattr(error, "strerror", "") or str(error)
        if is_first and self._lost is not None:
            self._lost(self.trouble)


def lead_nowhere(stream: TextIO) -> None:
    """What is still in this stream's buffers, and all that follows, is nobody's."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_standard_streams() -> None:
    """Where a process began with closed ones (``>&-``), nothing else may take their numbers.

    What a terminal of few letters cannot show is written as a number, as on standard error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(number, True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a name that it has no letters for


class Tail:
    """Shows what the main worker prints, from its log.

    Args:
        paths: each worker's log; the first one's is followed at first.
    """

    def __init__(self, paths: Sequence[Path], show: Callable[[str], None]) -> None:
        self._paths = paths
        self._path = paths[0]
        self._show = show
        self._seen = self._size()

    def follow(self, seat: int) -> None:
        """Show the end of what the last main worker printed, and from now on this one's words."""
        self.show(is_last=True)
        self._path = self._paths[seat]
        self._seen = self._size()

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def show(self, is_last: bool = False) -> None:
        """Show the whole lines that are new; at the last, also one that was not ended."""
        try:
            with open_to_read(self._path) as file:
                file.seek(self._seen)
                data = file.read()
        except OSError:
            return
        whole = data if is_last else data[: data.rfind(b"\n") + 1]
        if whole:
            self._seen += len(whole)
            self._show(whole.decode(errors="replace"))
