"""Lets a process keep the memory that it frees, for the next step.

The C library maps a tensor of more than 32 MB when it is allocated, unmaps it when it is freed, and
returns free memory at the end of its heap. The next step asks for the same memory again, and the
kernel fills every page with zeros: for ResNet-18 with 256 images on a CPU 600,000 pages a step, a
third of its time (results/fast.md). Kept memory is asked for once; the process then stays as large
as its largest step. The setting belongs to the whole process and is left alone if the user made it.
A process that an engine starts for a worker keeps memory unless the settings say otherwise.

Source: mallopt(3), M_MMAP_MAX and M_TRIM_THRESHOLD; PyTorch's Performance Tuning Guide, which
preloads a library for the same purpose.
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
"""Bytes: the limit of the C library's own mmap threshold; of its trim threshold, twice that."""


class _Heap:
    """The heap setting of this process."""

    is_kept = False
    is_set = False


def is_kept() -> bool:
    """Whether this process keeps freed memory."""
    return _Heap.is_kept


def restore(is_kept: bool) -> None:
    """Restore an earlier setting; does nothing if `keep` was never called.

    If memory is no longer kept, the thresholds are fixed at the limits of the C library's own.
    """
    if _Heap.is_set:
        keep(is_kept)


def keep(is_kept: bool) -> None:
    """Keep freed memory from now on, or stop keeping it.

    Raises:
        ConfigError: the C library has no such setting.
    """
    library = _library()
    if library is None:
        raise ConfigError("--keep-memory always needs glibc, which this system lacks; leave it out")
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
    """The C library if it is glibc, else None."""
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
    """Keep freed memory in the block, as processes started by an engine do."""
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
