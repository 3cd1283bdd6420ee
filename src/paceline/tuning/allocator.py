"""What a process keeps of the memory that it frees: all of it, for the next step, or nothing.

The C library maps a tensor of more than 32 MB when it is made and unmaps it when it is freed, and
gives back what lies free at the end of its heap. The next step asks for the same memory again, and
the kernel fills page after page with zeros: of ResNet-18 with 256 images on a CPU, 600,000 pages a
step, a third of its time (results/fast.md). Kept, they are asked for once; the process then stays
as large as its largest step. It is a setting of the whole process, and is left alone where the user
made it; a process that an engine begins for a worker has it unless it is told otherwise.

Source: mallopt(3), M_MMAP_MAX and M_TRIM_THRESHOLD; PyTorch's Performance Tuning Guide, which has a
library preloaded for it.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import ConfigError

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_USUAL_MAPS = 65536
_LARGEST_IN_HEAP = 32 << 20
"""Bytes: up to here the C library's own threshold grows, and that of the heap's end to twice it."""


class _Heap:
    """That of this process."""

    is_kept = False
    is_set = False


def is_kept() -> bool:
    """Whether freed memory stays."""
    return _Heap.is_kept


def restore(is_kept: bool) -> None:
    """Once more as it was; where `keep` was never called nothing is touched.

    Where it was, and memory does not stay, the thresholds are fixed where the C library's own end.
    """
    if _Heap.is_set:
        keep(is_kept)


def keep(is_kept: bool) -> None:
    """Let freed memory stay from now on, or no longer.

    Raises:
        ConfigError: the C library has no such setting.
    """
    library = _library()
    if library is None:
        raise ConfigError("--keep-memory always needs glibc, which is not here; leave it out")
    if is_kept:
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, -1)
    else:
        library.mallopt(_MMAP_MAX, _USUAL_MAPS)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_IN_HEAP)
        library.malloc_trim(0)
    _Heap.is_kept, _Heap.is_set = is_kept, True


def is_there() -> bool:
    """Whether the C library has such a setting."""
    return _library() is not None


def _library() -> ctypes.CDLL | None:
    """The C library, where it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def may_keep() -> bool:
    """Whether the C library has such a setting, and the user has not set it."""
    return is_there() and not is_tuned()


def is_tuned() -> bool:
    """Whether the user configured the C library's memory."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in names) or "glibc.malloc." in tunables


@contextmanager
def as_in_workers() -> Iterator[None]:
    """Keep freed memory meanwhile, as processes started by an engine do."""
    with kept_process():
        if may_keep():
            keep(True)
        yield


class kept_process:
    """Restore threads and heap settings after the block."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        self._is_kept = is_kept()

    def __exit__(self, *_: object) -> None:
        restore(self._is_kept)
        torch.set_num_threads(self._threads)
