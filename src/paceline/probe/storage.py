"""The disk of a folder: one small read at a random offset, many at once, and large ones.

    written first        a file of random words to read from
    random, one          4 KiB at a time: its latency
    random, many         4 KiB by 32 threads: reads a second
    large                1 MiB by 8 threads: bandwidth

Reads bypass the page cache (O_DIRECT) where the file system allows it. Where it does not, as on
tmpfs, the kernel is asked to drop the file from its cache, and each figure says that the cache may
have answered. The host of a virtual machine may cache its disk, which cannot be seen from inside.
"""

import contextlib
import errno
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import FileError
from ..plan import format_bytes
from .figures import Figure, Group, Unit
from .kernels import Kernels

_MIB = 1 << 20
_FILE_BYTES = 512 * _MIB
_BLOCK_BYTES, _LARGE_BYTES = 4096, _MIB
_MANY_THREADS, _LARGE_THREADS = 32, 8
_REPEATS = 3
_ROUND_S = 0.4
_SHARE = 10
"""The file takes at most one part in this many of the free space."""
_DIRECT = getattr(os, "O_DIRECT", 0)


def storage_figures(kernels: Kernels, folder: Path) -> Iterator[Figure]:
    """Yield the figures of the disk that the folder lies on.

    Raises:
        FileError: the folder cannot be written to.
    """
    try:
        size = min(_FILE_BYTES, shutil.disk_usage(folder).free // _SHARE) // _MIB * _MIB
        if size < 16 * _MIB:
            raise OSError(errno.ENOSPC, "less than 160 MiB are free")
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".paceline-probe-") as file:
            path = Path(file.name)
            written = _written(kernels, path, size)
            with _opened(path, os.O_RDONLY) as (fd, is_direct):
                yield from _figures(kernels, fd, size, is_direct, written)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(error.errno or errno.EIO, reason, str(folder)) from None


def _written(kernels: Kernels, path: Path, size: int) -> float:
    with _opened(path, os.O_WRONLY) as (fd, _):
        return kernels.write_file(fd, size, _LARGE_BYTES)


@contextlib.contextmanager
def _opened(path: Path, mode: int) -> Iterator[tuple[int, bool]]:
    """Yield a descriptor and whether it bypasses the page cache."""
    is_direct = bool(_DIRECT)
    try:
        fd = os.open(path, mode | _DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd, is_direct = os.open(path, mode | os.O_CLOEXEC), False
    try:
        yield fd, is_direct
    finally:
        os.close(fd)


def _figures(
    kernels: Kernels, fd: int, size: int, is_direct: bool, written: float
) -> Iterator[Figure]:
    cache_note = "O_DIRECT" if is_direct else "no O_DIRECT here: the page cache may have answered"
    where = f"in {format_bytes(size)}, {cache_note}"

    def forget() -> None:
        if not is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)

    forget()
    rounds = [
        statistics.median(kernels.read_blocks(fd, size, _BLOCK_BYTES, 1, _ROUND_S / 2).each_s)
        for _ in range(2 * _REPEATS)
    ]
    yield _figure("disk_read_latency_s", "disk, 4 KiB at a random offset", Unit.SECONDS,
                  tuple(rounds), f"half of the reads take no longer; {where}")  # fmt: skip
    many, large = [], []
    for _ in range(_REPEATS):
        forget()
        many.append(kernels.read_blocks(fd, size, _BLOCK_BYTES, _MANY_THREADS, _ROUND_S).per_s)
    yield _figure("disk_reads_per_s", "disk, 4 KiB at random offsets, many", Unit.COUNT,
                  tuple(many), f"{_MANY_THREADS} threads, {cache_note}")  # fmt: skip
    for _ in range(_REPEATS):
        forget()
        large.append(kernels.read_file(fd, size, _LARGE_BYTES, _LARGE_THREADS))
    yield _figure("disk_read_bytes_per_s", "disk, read in blocks of 1 MiB", Unit.BYTES,
                  tuple(large), f"{_LARGE_THREADS} threads, {cache_note}")  # fmt: skip
    yield _figure("disk_write_bytes_per_s", "disk, written and flushed", Unit.BYTES, (written,),
                  f"{format_bytes(size)} once, {cache_note}")  # fmt: skip


def _figure(key: str, what: str, unit: Unit, samples: tuple[float, ...], how: str) -> Figure:
    return Figure(key=key, what=what, group=Group.STORAGE, unit=unit, samples=samples, how=how)
