"""One file of a data set, read whole and compared with its sum.

A cut download or a rotten disk shows itself here, as one sentence, and not as a strange accuracy
an hour later. A plain file is mapped, not read: the workers of one machine share its pages. It
must not know what the bytes mean.
"""

import gzip
import hashlib
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..errors import ConfigError
from ..system.files import open_to_read
from .catalogue import DataFile

Bytes: TypeAlias = bytearray | mmap.mmap


@dataclass(frozen=True, slots=True)
class _Damage:
    found: str


def read_checked(path: Path, file: DataFile, remedy: str) -> Bytes:
    """The decompressed content of ``path``, which is surely that of ``file``.

    Writing to what is returned changes neither the file nor another process's view.

    Args:
        remedy: what the user can do if it is not; ends the message.

    Raises:
        ConfigError: cut, corrupt or not readable; tells the sum wanted and found.
    """
    try:
        content = _read_gzip(path, file) if path.suffix == ".gz" else _map(path, file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; {remedy}") from error
    if not isinstance(content, _Damage):
        md5 = _md5(content).hexdigest()
        if md5 == file.md5:
            return content
        content = _Damage(f"md5 {md5}")
    raise ConfigError(
        f"{path} is damaged: wanted {file.num_bytes:,} bytes with md5 {file.md5} (decompressed), "
        f"found {content.found}; {remedy}"
    )


def _md5(content: Bytes | bytes) -> "hashlib._Hash":
    # Against accidents, not attackers; builds of Python for FIPS ask to be told so.
    return hashlib.md5(content, usedforsecurity=False)


def _map(path: Path, file: DataFile) -> Bytes | _Damage:
    with open_to_read(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size != file.num_bytes or not size:
            md5 = hashlib.file_digest(stream, lambda: _md5(b"")).hexdigest()
            return _Damage(f"{size:,} bytes with md5 {md5}")
        # ACCESS_COPY: private to this process, so that torch may take it as writable memory.
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def _read_gzip(path: Path, file: DataFile) -> Bytes | _Damage:
    content = bytearray(file.num_bytes)
    filled = 0
    try:
        with open_to_read(path) as packed, gzip.open(packed) as stream:
            # Read into a block of the right size: a file made to swell cannot fill the memory.
            while count := stream.readinto(memoryview(content)[filled:]):
                filled += count
            if stream.read(1):
                return _Damage(f"more than {file.num_bytes:,} bytes")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return _Damage(f"a broken gzip file after {filled:,} bytes ({error})")
    if filled != file.num_bytes:
        return _Damage(f"{filled:,} bytes")
    return content
