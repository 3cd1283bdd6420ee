"""Output that may go away (a closed pipe, a terminal, a full disk), and which stream is ready.

Training does not end because nobody reads its output. `Tail` follows what the main worker prints to
its log. This module must not know what is said, nor processes.
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
    """Return the descriptors that are ready to read or write, or whose other end is gone.

    Like ``select``, which is limited to the first 1,024 descriptors of a process.

    Args:
        timeout_s: return an empty set after this time; None: no limit.
    """
    poll = select.poll()
    for descriptor in readers:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writers:
        poll.register(descriptor, select.POLLOUT)
    return {
        descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)
    }


class Lasting:
    """A text stream that does not raise if writing fails.

    All else is forwarded to the stream. If its reader is gone, the stream is redirected to nowhere,
    so that output still in its buffer does no harm either.

    Args:
        stream: where to write.
        lost: called once with the reason why output is lost.

    Attributes:
        trouble: why output was lost; empty: none was.
    """

    def __init__(self, stream: TextIO, lost: Callable[[str], None] | None = None) -> None:
        self._stream = stream
        self._lost = lost
        self.trouble = ""

    def write(self, text: str) -> int:
        """Write the text; always report it as written."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # a terminal with a limited encoding
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
    """Redirect the stream to /dev/null, including what is in its buffers."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def open_standard_streams() -> None:
    """Open closed standard streams (``>&-``), so that no other file takes their numbers.

    Characters that a terminal cannot show are escaped, as on standard error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            os.set_inheritable(number, True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a name that it cannot encode


class Tail:
    """Shows what the main worker prints, from its log.

    Args:
        paths: each worker's log; it starts with the first one.
    """

    def __init__(self, paths: Sequence[Path], show: Callable[[str], None]) -> None:
        self._paths = paths
        self._path = paths[0]
        self._show = show
        self._seen = self._size()

    def follow(self, seat: int) -> None:
        """Show the rest of the last main worker's log, then follow this worker's."""
        self.show(is_last=True)
        self._path = self._paths[seat]
        self._seen = self._size()

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def show(self, is_last: bool = False) -> None:
        """Show new complete lines; with ``is_last`` also an incomplete one."""
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
