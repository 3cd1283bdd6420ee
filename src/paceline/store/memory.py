"""Memory that several processes share, and words in it that can be waited on.

The memory is a memfd: it has no name, so nothing is left in /dev/shm after any end, and no small
container limit holds for it. Where memfd or futex do not exist (macOS) an unlinked temporary file
and a short sleep take their place. Above 300 lines, since each kind of memory stands beside its
fallback. This module must not know what is stored in the memory.
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
"""A cache line: words that different members write lie on different lines."""
WORD_BYTES = 8
_LOWER_HALF = 0 if sys.byteorder == "little" else 4

_SPIN_S = 30e-6
"""Less than it costs to put a core to sleep and wake it. Longer is worse where processes outnumber
cores, because who yields is still in the way of who is awaited: bench/pushes.py made 2,300 pushes a
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
        """Set the size; pages are taken only when they are touched."""
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
        """All of it is zeros again, in every process that maps it; its pages are given back.

        It keeps its size: whoever looked into it while it had none would be killed.
        """
        size = self.num_bytes
        if size and not self._remove(0, size):
            os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, size)

    def renew(self) -> None:
        """Look into it as large as it is now; what looks into it already goes on to."""
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
        """Nobody will map it or inherit it any more; what is mapped here stays."""
        os.close(self.fd)

    def close(self) -> None:
        """Let go of it; where nobody else holds it, the memory is free again."""
        if self._map is not None:
            self._map.close()
        os.close(self.fd)

    def used_bytes(self) -> int:
        """Bytes of the pages that have been touched by anybody."""
        return os.fstat(self.fd).st_blocks * 512

    def release(self, start: int, stop: int) -> None:
        """Give the whole pages of this range back to the machine; they read as zeros then."""
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, stop // page * page
        if last > first:
            self._remove(first, last)

    def _remove(self, start: int, stop: int) -> bool:
        """Give every page that has a byte of this range back; False: no such advice is known."""
        if not hasattr(mmap, "MADV_REMOVE"):
            return False
        try:
            self.buffer.madvise(mmap.MADV_REMOVE, start, stop - start)
        except OSError:
            return False
        return True


class PrivateMemory:
    """Memory with the verbs of shared memory, of one process alone."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.buffer = bytearray(num_bytes)

    def grow(self, num_bytes: int) -> None:
        self.buffer = bytearray(num_bytes)

    @property
    def num_bytes(self) -> int:
        return len(self.buffer)

    def renew(self) -> None:
        """It is looked into as it is."""

    def clear(self) -> None:
        """All of it is zeros again."""
        self.buffer[:] = bytes(len(self.buffer))

    def tensor(self) -> "Tensor":
        import torch  # here: the launcher maps words only and starts without torch

        return torch.frombuffer(self.buffer, dtype=torch.uint8)

    def release(self, start: int, stop: int) -> None:
        """One process keeps what it has."""


class Region:
    """``memory`` as bytes, as 64-bit words and as an address: a store of keys needs all three.

    Tensors lie in the bytes, versions in the words, and the locks of the C library want an address.
    It is freed when the last tensor that looks into it is gone.

    Args:
        memory: of full size; the descriptor becomes the region's.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.data = memory.tensor()
        """``(num_bytes,)`` uint8."""
        self.words = memoryview(memory.buffer).cast("q")
        """``data`` as int64: each of them is read and written whole."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer))
        self._finalizer = weakref.finalize(self, os.close, memory.fd)

    @classmethod
    def attach(cls, fd: int) -> "Region":
        """The region behind a descriptor that another process has handed over, which stays open."""
        own = -1
        try:
            own = os.dup(fd)
            return cls(SharedMemory(own))
        except (OSError, TypeError, ValueError) as error:
            if own >= 0:
                os.close(own)
            raise ConfigError(
                f"descriptor {fd} is no shared memory of a store ({error}); hand over store.fd: "
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
        """Give the descriptor back; the mapping goes with its last user."""
        self._finalizer()


Memory: TypeAlias = SharedMemory | PrivateMemory


def spin() -> Iterator[None]:
    """Turns of a short wait; between two of them other processes may have this core."""
    end_s = time.perf_counter() + _SPIN_S
    while time.perf_counter() < end_s:
        yield
        _give_way()


_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class Words:
    """64-bit words in shared memory, one to a cache line or packed, that can be waited on.

    A word has one writer at a time; readers see it whole, and whoever has seen it sees all that its
    writer wrote before. ``wait_while`` spins for a moment and then sleeps in the kernel until a
    ``wake`` of that word or the time-out. The kernel looks at the lower half of it, which is enough
    to sleep by.
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
        """So many words from this one on, as float64; to be read at once."""
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
    ) -> bool:
        """Wait while ``is_early(value)``; False when ``timeout_s`` ran out or nobody knows why.

        ``is_soon``: the wait is short if all goes well, so spin before sleeping.
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
        self._sleep(index, value, timeout_s)
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
