"""A trace that is still being written: its records as they come. It must not know what they mean.

    read what is there -> all whole lines -> a pause -> what came since -> ... -> the last line

Only bytes that came since the last look are read, so a look at a long run costs what is new in it.
A run that loses all its workers goes on from its last checkpoint, in the same file cut off there or
in another of that name: it is then read from its first line.
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
    """A trace under way. OSError: it cannot be read.

    Args:
        path: of the trace, which is there; its first line may not be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BufferedReader = open_to_read(path)
        self._number, self._sum = 0, 0
        self._rest = b""

    def new(self) -> Iterator[Record]:
        """The records that came since the last look; of a line that is half written none.

        Where lines that were read are no longer there, all records from the header on.

        Raises:
            ConfigError: it is damaged, or of another format.
        """
        if self._is_another():
            self._begin_anew()
        is_first = not self._number
        try:
            yield from self._whole()
        except ConfigError:
            if is_first:
                raise
            self._begin_anew()  # it may have been cut off, and be longer again by now
            yield from self._whole()

    def _is_another(self) -> bool:
        """Whether it has shrunk, or another file has its name."""
        try:
            now = os.stat(self.path)
        except OSError:  # it is about to be there again
            return False
        own = os.fstat(self._file.fileno())
        return not os.path.samestat(now, own) or now.st_size < self._file.tell()

    def _begin_anew(self) -> None:
        self._file.close()
        self._file = open_to_read(self.path)
        self._number, self._sum, self._rest = 0, 0, b""

    def _whole(self) -> Iterator[Record]:
        while line := self._file.readline(LONGEST_BYTES):
            self._rest += line
            if not self._rest.endswith(b"\n") and len(self._rest) < LONGEST_BYTES:
                continue
            whole, self._rest = self._rest, b""
            self._number += 1
            record, self._sum = record_of(self.path, self._number, whole, self._sum)
            yield record

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
