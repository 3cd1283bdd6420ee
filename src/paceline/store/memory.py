"""Memory shared by several processes, and words in it that can be waited on.

The memory is a memfd: it has no name, so nothing is left in /dev/shm however a process ends, and a
container's small /dev/shm limit does not apply. Without memfd or futex (macOS) an unlinked
temporary file and a short sleep replace them. Above 300 lines, since each kind of memory is beside
its fallback. This module must not know what is stored in the memory.
"""

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ConfigError, LinkError
from ..system.limits import available_bytes, describe_limits
from .fences import ordered

if TYPE_CHECKING:
    from torch import Tensor

LINE_BYTES = 64
"""A cache line: words of different writers are on different lines."""
WORD_BYTES = 8
_LOWER_HALF = 0 if sys.byteorder == "little" else 4

_SPIN_S = 30e-6
"""Less than it costs to put a core to sleep and wake it. Longer is worse with more processes than
cores, because a yielding process still delays the awaited one: bench/pushes.py made 2,300 pushes a
second with 30 us, 1,900 with 200 us, 790 with 1 ms."""
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1


class SharedMemory:
    """A block of memory that lives as long as one process maps or holds its descriptor.

    Args:
        fd: descriptor of a block made by ``create``; it may be grown before it is mapped.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, num_bytes: int = 0) -> "SharedMemory":
        if hasattr(os, "memfd_create"):
            memory = cls(os.memfd_create("paceline", 0))
        else:
            with tempfile.TemporaryFile() as file:
                memory = cls(os.dup(file.fileno()))
        os.set_inheritable(memory.fd, True)
        if num_bytes:
            memory.grow(num_bytes)
        return memory

    def grow(self, num_bytes: int) -> None:
        """Set the size; pages are allocated when they are touched."""
        available = available_bytes()
        if num_bytes > available:
            limits = describe_limits()
            raise LinkError(
                f"shared memory: {num_bytes / 2**20:,.0f} MiB are needed, "
                f"{available / 2**20:,.0f} MiB are free on this machine"
                f"{f' (allowed: {limits})' if limits else ''}; use fewer workers or a smaller model"
            )
        self.renew()
        try:
            os.ftruncate(self.fd, num_bytes)
        except OSError as error:
            why = " (ulimit -f)" if error.errno == errno.EFBIG else ""
            raise LinkError(
                f"shared memory: {num_bytes / 2**20:,.0f} MiB: {error.strerror}{why}"
            ) from None

    def clear(self) -> None:
        """Reset all bytes to zero, in every process that maps them, and free the pages.

        The size stays: a process that reads an empty file's mapping would be killed.
        """
        size = self.num_bytes
        if size and not self._remove(0, size):
            os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, size)

    def renew(self) -> None:
        """Map it again at its current size on next use; existing views stay valid."""
        self._map = None

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def buffer(self) -> mmap.mmap:
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.num_bytes)
        return self._map

    def tensor(self) -> "Tensor":
        """The whole block as bytes, ``(num_bytes,)`` uint8, sharing the memory."""
        import torch  # here: the launcher maps words only and starts without torch

        return torch.frombuffer(self.buffer, dtype=torch.uint8)

    def close_descriptor(self) -> None:
        """Close the descriptor, so that nothing maps it any more; this process's mapping stays."""
        os.close(self.fd)

    def close(self) -> None:
        """Close it; the memory is freed when no process holds it any more."""
        if self._map is not None:
            self._map.close()
        os.close(self.fd)

    def used_bytes(self) -> int:
        """Bytes of the pages that have been touched by anybody."""
        return os.fstat(self.fd).st_blocks * 512

    def release(self, start: int, stop: int) -> None:
        """Free the whole pages in this range; they read as zeros then."""
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, stop // page * page
        if last > first:
            self._remove(first, last)

    def _remove(self, start: int, stop: int) -> bool:
        """Free every page that overlaps this range; False: not supported here."""
        if not hasattr(mmap, "MADV_REMOVE"):
            return False
        try:
            self.buffer.madvise(mmap.MADV_REMOVE, start, stop - start)
        except OSError:
            return False
        return True


class PrivateMemory:
    """Memory of one process, with the interface of shared memory."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.buffer = bytearray(num_bytes)

    def grow(self, num_bytes: int) -> None:
        self.buffer = bytearray(num_bytes)

    @property
    def num_bytes(self) -> int:
        return len(self.buffer)

    def renew(self) -> None:
        """Nothing to do."""

    def clear(self) -> None:
        """Reset all bytes to zero."""
        self.buffer[:] = bytes(len(self.buffer))

    def tensor(self) -> "Tensor":
        import torch  # here: the launcher maps words only and starts without torch

        return torch.frombuffer(self.buffer, dtype=torch.uint8)

    def release(self, start: int, stop: int) -> None:
        """Nothing to do: one process keeps its memory."""


class Region:
    """``memory`` as bytes, as 64-bit words and as an address, for a store of keys.

    Tensors are views of the bytes, versions are words, and the C library's locks need an address.
    It is freed with the last tensor over it.

    Args:
        memory: of full size; the descriptor becomes the region's.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.data = memory.tensor()
        """``(num_bytes,)`` uint8."""
        self.words = memoryview(memory.buffer).cast("q")
        """``data`` as int64; each word is read and written whole."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer))
        self._finalizer = weakref.finalize(self, os.close, memory.fd)

    @classmethod
    def attach(cls, fd: int) -> "Region":
        """The region of a descriptor passed by another process; the descriptor stays open."""
        own = -1
        try:
            own = os.dup(fd)
            return cls(SharedMemory(own))
        except (OSError, TypeError, ValueError) as error:
            if own >= 0:
                os.close(own)
            raise ConfigError(
                f"descriptor {fd} is no shared memory of a store ({error}); pass store.fd: "
                "subprocess.Popen(..., pass_fds=[store.fd])"
            ) from None

    @property
    def fd(self) -> int:
        return self._memory.fd

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def used_bytes(self) -> int:
        """Bytes of the pages that have been touched by anybody."""
        return self._memory.used_bytes()

    def close(self) -> None:
        """Close the descriptor; the mapping stays until its last user is gone."""
        self._finalizer()


Memory: TypeAlias = SharedMemory | PrivateMemory


def spin() -> Iterator[None]:
    """Yield repeatedly for a short wait, giving this core to other processes in between."""
    end_s = time.perf_counter() + _SPIN_S
    while time.perf_counter() < end_s:
        yield
        _give_way()


_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class Words:
    """64-bit words in shared memory, one to a cache line or packed, that can be waited on.

    A word has one writer at a time; readers see it whole, and a reader of a word sees all that its
    writer wrote before. ``wait_while`` spins for a moment and then sleeps in the kernel until a
    ``wake`` of that word or the timeout. The kernel compares only the lower half of the word, which
    is sufficient.
    """

    def __init__(self, memory: Memory) -> None:
        buffer = memory.buffer
        self._view = ordered(memoryview(buffer).cast("q"))
        self._doubles = ordered(memoryview(buffer).cast("d"))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + _LOWER_HALF

    def __getitem__(self, index: int) -> int:
        value: int = self._view[index]
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self._view[index] = value

    def double(self, index: int) -> float:
        """The word as a float64."""
        value: float = self._doubles[index]
        return value

    def doubles(self, index: int, count: int) -> Sequence[float]:
        """``count`` words from ``index`` on, as float64; read them immediately."""
        values: Sequence[float] = self._doubles[index : index + count]
        return values

    def set_double(self, index: int, value: float) -> None:
        self._doubles[index] = value

    def set_and_wake(self, index: int, value: int) -> None:
        self[index] = value
        self.wake(index)

    def wake(self, index: int) -> None:
        if _futex_number is not None:
            address = self._address + WORD_BYTES * index
            _syscall(_futex_number, address, _WAKE, 2**31 - 1, None, None, 0)

    def wait_while(
        self,
        index: int,
        is_early: Callable[[int], bool],
        timeout_s: float,
        *,
        is_soon: bool = True,
        asleep: int | None = None,
    ) -> bool:
        """Wait while ``is_early(value)``; False after ``timeout_s`` or a spurious wakeup.

        Args:
            is_soon: the wait is normally short, so spin before sleeping.
            asleep: a word that is 1 while this process sleeps, so that who sets the value need not
                wake it otherwise.
        """
        view = self._view
        value = view[index]
        if not is_early(value):
            return True
        if timeout_s <= 0.0:
            return False
        for _ in spin() if is_soon else ():
            value = view[index]
            if not is_early(value):
                return True
        if asleep is None:
            self._sleep(index, value, timeout_s)
            return not is_early(view[index])
        view[asleep] = 1
        if is_early(value := view[index]):  # else it was set before the other could see the word
            self._sleep(index, value, timeout_s)
        view[asleep] = 0
        return not is_early(view[index])

    def _sleep(self, index: int, value: int, timeout_s: float) -> None:
        if _futex_number is None:
            time.sleep(min(timeout_s, 1e-4))
            return
        seconds = int(timeout_s)
        spec = _TimeSpec(seconds, int((timeout_s - seconds) * 1e9))
        address = self._address + WORD_BYTES * index
        seen = value & 0xFFFFFFFF
        _syscall(_futex_number, address, _WAIT, seen, ctypes.byref(spec), None, 0)


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _find_futex() -> tuple[int | None, "ctypes._NamedFuncPointer | None"]:
    number = _FUTEX.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        return None, None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = [
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int,
    ]  # fmt: skip
    call.restype = ctypes.c_long
    return number, call


_futex_number, _futex_call = _find_futex()


def _syscall(number: int, *arguments: object) -> None:
    assert _futex_call is not None
    _futex_call(number, *arguments)
