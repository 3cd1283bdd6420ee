"""Reads a trace that is still being written. It must not know what its records mean.

    read the file -> all complete lines -> a pause -> the new lines -> ... -> the last line

Each look reads only the bytes that are new, also in a long run. A run that loses all its workers
resumes from its last checkpoint, in the same file, truncated there, or in another of that name: it
is then read again from its first line.
"""

import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Self

from ..errors import ConfigError
from ..system.files import open_to_read
from .reader import record_of
from .records import LONGEST_BYTES, Record


class FollowedTrace:
    """A trace that is being written.

    Args:
        path: of the trace, which exists; its first line may be missing.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BufferedReader = open_to_read(path)
        self._number, self._sum = 0, 0
        self._rest = b""

    def new(self) -> Iterator[Record]:
        """Yield the records since the last look; an incomplete line is left for the next one.

        If lines that were read are gone, yield all records from the header on.

        Raises:
            ConfigError: it is damaged, or of another format.
        """
        if self._was_replaced():
            self._reopen()
        is_first = not self._number
        try:
            yield from self._complete_lines()
        except ConfigError:
            if is_first:
                raise
            self._reopen()  # it may have been truncated, and have grown again since
            yield from self._complete_lines()

    def _was_replaced(self) -> bool:
        """Return whether the file shrank, or another file has its name."""
        try:
            named = os.stat(self.path)
        except OSError:  # it is being replaced
            return False
        read = os.fstat(self._file.fileno())
        return not os.path.samestat(named, read) or named.st_size < self._file.tell()

    def _reopen(self) -> None:
        self._file.close()
        self._file = open_to_read(self.path)
        self._number, self._sum, self._rest = 0, 0, b""

    def _complete_lines(self) -> Iterator[Record]:
        while part := self._file.readline(LONGEST_BYTES):
            self._rest += part
            if not self._rest.endswith(b"\n") and len(self._rest) < LONGEST_BYTES:
                continue
            line, self._rest = self._rest, b""
            self._number += 1
            record, self._sum = record_of(self.path, self._number, line, self._sum)
            yield record

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
