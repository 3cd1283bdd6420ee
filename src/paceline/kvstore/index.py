"""The head of a store's memory: locks that are released by a death, and the list of keys.

    line 0      the header: format, shards, bytes of the list, bytes taken
    locks       of the list; of each shard:  [ mutex: 64 bytes ][ its owner's process | 7 words ]
    the list    lines of JSON: a key, the state of a key, or a rule; it only grows
    the rest    allocated from the start to the end, never freed

A line is written first and counted afterwards, so a process that dies while it adds a key leaves
the list unchanged. On Linux the locks are robust mutexes of the C library: a futex with its owner's
thread, which the kernel releases when that thread ends in any way. Elsewhere a record lock of the
file, which the kernel releases too, is combined with a lock of this process. Neither says whether
the guarded data are whole. A bit above 300 lines because of the C library's types. This module must
not know how a key's value is changed.
"""

import abc
import ctypes
import dataclasses
import errno
import fcntl
import json
import math
import os
import sys
import threading
import time
from typing import Any

import torch

from ..errors import ConfigError, LinkError
from ..store.fences import HAS_ORDER
from ..store.memory import LINE_BYTES, WORD_BYTES, Region, SharedMemory

LIST_BYTES = 16 * 2**20
"""Address space for the list: some hundred thousand keys. Pages are allocated when used."""

_PAGE_BYTES = 4096
_MAGIC = int.from_bytes(b"PACEKV02", "little")
_FORMAT, _SHARDS, _LISTED, _TAKEN = range(4)
"""The words of line 0."""

_MUTEX_BYTES, _LOCK_BYTES = 64, 128
_SHARED, _ROBUST, _ERRORCHECK = 1, 1, 2
_SLICE_S = 0.5
"""Interval at which a waiting thread checks for signals: the delay of Ctrl-C."""
_POLL_S = 1e-4
_OWN_S = 1e-3
"""Wait for a lock that is this thread's own: an attempt without a wait may not tell whose it is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One key; ``offset`` of its words in bytes, ``shard`` is the lock that guards it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shard: int
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ThreadHold(threading.local):
    """Whether this thread holds a lock of the store, as one does that runs an updater."""

    is_held = False


class Directory:
    """The list of keys and the locks of ``region``, in one process. Writers hold ``lock``."""

    def __init__(self, region: Region, patience_s: float) -> None:
        words = region.words
        if region.num_bytes < LINE_BYTES or words[_FORMAT] != _MAGIC:
            raise ConfigError(
                f"descriptor {region.fd} is not a store of this version of Paceline; pass "
                "store.fd, and use one version in all processes"
            )
        self._region = region
        self.hold = ThreadHold()
        names = ["the list of keys", *(f"shard {i}" for i in range(words[_SHARDS]))]
        kind = MutexLock if HAS_MUTEXES else RecordLock
        self.lock, *self.shards = [
            kind(region, LINE_BYTES + i * _LOCK_BYTES, name, patience_s, self.hold)
            for i, name in enumerate(names)
        ]
        self._list = _list_start(len(self.shards))
        self._num_read = 0
        self.records: dict[str, Record] = {}
        self.states: dict[tuple[str, str], int] = {}
        """(key, rule) -> the offset of the rule's state of the key."""
        self.rule = ""
        """The name of the newest rule, which every process must apply."""
        self.refresh()

    def refresh(self) -> None:
        """Read new lines; safe in several threads at once: all read the same."""
        if self._region.words[_LISTED] == self._num_read:
            return
        if HAS_ORDER or self.hold.is_held:
            self._read_new()
        else:  # the new count may be visible before the new lines
            with self.lock:
                self._read_new()

    def _read_new(self) -> None:
        listed = self._region.words[_LISTED]
        content = self._region.data[self._list + self._num_read : self._list + listed]
        for row in map(json.loads, content.numpy().tobytes().splitlines()):
            if "key" not in row:
                self.rule = row["rule"]
            elif "rule" in row:
                self.states[row["key"], row["rule"]] = row["offset"]
            else:
                row |= {"dtype": getattr(torch, row["dtype"]), "shape": tuple(row["shape"])}
                self.records[row["key"]] = Record(**row)
        self._num_read = listed

    def loads_bytes(self) -> list[int]:
        """Per shard, the bytes of the values that it guards."""
        loads = [0] * len(self.shards)
        for record in list(self.records.values()):
            loads[record.shard] += record.num_bytes
        return loads

    def take(self, num_bytes: int, purpose: str) -> int:
        """Allocate zeroed bytes, aligned to a line or page; returns the offset. Needs ``lock``."""
        words, total = self._region.words, self._region.num_bytes
        align = _PAGE_BYTES if num_bytes >= _PAGE_BYTES else LINE_BYTES
        start = -(-words[_TAKEN] // align) * align
        if start + num_bytes > total:
            raise ConfigError(
                f"the store is full: {purpose} needs {num_bytes:,} bytes, "
                f"{max(0, total - start):,} of {total - self._list - LIST_BYTES:,} are left; "
                "create it with a larger capacity_bytes (memory is taken only when it is used)"
            )
        words[_TAKEN] = start + num_bytes
        return start

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add keys, states of keys, or a rule; others see all or none. Needs ``lock``."""
        content = "".join(f"{json.dumps(row, separators=(',', ':'))}\n" for row in rows).encode()
        words = self._region.words
        listed = words[_LISTED]
        if listed + len(content) > LIST_BYTES:
            raise ConfigError(
                f"the store's list of keys is full ({len(self.records):,} keys); "
                "combine small tensors into fewer keys"
            )
        start = self._list + listed
        self._region.data[start : start + len(content)].copy_(
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
        )
        words[_LISTED] = listed + len(content)
        self.refresh()


def make_region(num_shards: int, capacity_bytes: int, rule: str) -> Region:
    """New memory with an empty store."""
    num_bytes = _list_start(num_shards) + LIST_BYTES + capacity_bytes
    region = Region(SharedMemory.create(num_bytes))
    region.words[_SHARDS] = num_shards
    region.words[_TAKEN] = _list_start(num_shards) + LIST_BYTES
    for number in range(1 + num_shards):
        _prepare_lock(region, LINE_BYTES + number * _LOCK_BYTES)
    region.words[_FORMAT] = _MAGIC
    Directory(region, patience_s=1.0).append([{"rule": rule}])
    return region


def _list_start(num_shards: int) -> int:
    return -(-(LINE_BYTES + (1 + num_shards) * _LOCK_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


@dataclasses.dataclass
class Lock(abc.ABC):
    """A lock of one thread of one process, used by ``with``; released if its holder ends.

    Args:
        offset: in bytes, a multiple of 64, where ``_prepare_lock`` has made it.
        name: for messages: what it guards.
        hold: shared by the locks of one store in this process.
    """

    region: Region
    offset: int
    name: str
    patience_s: float
    hold: ThreadHold

    def __enter__(self) -> None:
        """Wait for the lock.

        Raises:
            LinkError: another process has held it for ``patience_s``: it is stopped or hangs.
            ConfigError: this thread already holds one.
        """
        refuse_updaters(self.hold)
        words, owner = self.region.words, (self.offset + _MUTEX_BYTES) // WORD_BYTES
        left_s, end = 0.0, time.monotonic() + self.patience_s
        try:
            while not self._take(left_s):
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise LinkError(
                        f"{self.name} of the store has been held by process {words[owner]} for "
                        f"{self.patience_s:g} s: it is stopped or hangs in an updater; once it "
                        "ends, the others go on"
                    )
            words[owner] = os.getpid()
            self.hold.is_held = True
        except LinkError:
            raise
        except BaseException:  # raised again: Ctrl-C may come when this thread has just got it
            if self._take(_OWN_S):
                self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self.hold.is_held = False
        self._release()

    @abc.abstractmethod
    def _take(self, wait_s: float) -> bool:
        """Try to take the lock, waiting for at most ``wait_s``, or less."""

    @abc.abstractmethod
    def _release(self) -> None: ...


class MutexLock(Lock):
    """A robust mutex in the region."""

    def _take(self, wait_s: float) -> bool:
        address = ctypes.c_void_p(self.region.address + self.offset)
        if wait_s > 0:
            answer = _lock_within(address, min(wait_s, _SLICE_S))
        else:
            answer = _c.pthread_mutex_trylock(address)
        if answer in (errno.EBUSY, errno.ETIMEDOUT):
            return False
        if answer in (errno.EOWNERDEAD, errno.EDEADLK):  # EDEADLK: ours, Ctrl-C came in between
            _c.pthread_mutex_consistent(address)
        elif answer:
            raise LinkError(f"{self.name} of the store cannot be locked: {os.strerror(answer)}")
        return True

    def _release(self) -> None:
        _c.pthread_mutex_unlock(ctypes.c_void_p(self.region.address + self.offset))


class RecordLock(Lock):
    """A record lock on bytes ``[offset, offset + 1)`` of the region's file.

    Closing any descriptor of that file in this process releases it: attach once per process.
    """

    _pid = 0
    _here: threading.Lock

    def _take(self, wait_s: float) -> bool:
        if wait_s > 0:
            time.sleep(_POLL_S)
        if self._pid != os.getpid():  # a fork copies the lock's state, but not its holder
            self._here, self._pid = threading.Lock(), os.getpid()
        if not self._here.acquire(blocking=False):
            return False
        try:
            fcntl.lockf(self.region.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.offset)
        except BlockingIOError:
            self._here.release()
            return False
        return True

    def _release(self) -> None:
        fcntl.lockf(self.region.fd, fcntl.LOCK_UN, 1, self.offset)
        self._here.release()


def _prepare_lock(region: Region, offset: int) -> None:
    """Make a free lock in zeroed memory, before it is shared."""
    if not HAS_MUTEXES:
        return
    attributes = ctypes.create_string_buffer(64)
    _c.pthread_mutexattr_init(attributes)
    _c.pthread_mutexattr_setpshared(attributes, _SHARED)
    _c.pthread_mutexattr_setrobust(attributes, _ROBUST)
    _c.pthread_mutexattr_settype(attributes, _ERRORCHECK)
    answer = _c.pthread_mutex_init(ctypes.c_void_p(region.address + offset), attributes)
    _c.pthread_mutexattr_destroy(attributes)
    if answer:
        raise LinkError(f"no lock can be made in shared memory: {os.strerror(answer)}")


def _lock_within(mutex: ctypes.c_void_p, wait_s: float) -> int:
    """Lock with a timeout, by a monotonic clock if the C library has that; returns its result."""
    if hasattr(_c, "pthread_mutex_clocklock"):
        spec = _time_spec(time.monotonic() + wait_s)
        return int(_c.pthread_mutex_clocklock(mutex, time.CLOCK_MONOTONIC, ctypes.byref(spec)))
    spec = _time_spec(time.time() + wait_s)
    return int(_c.pthread_mutex_timedlock(mutex, ctypes.byref(spec)))


def refuse_updaters(hold: ThreadHold) -> None:
    """Raise ConfigError if this thread holds a lock: an updater called."""
    if hold.is_held:
        raise ConfigError(
            "an updater may change `stored`, but must not use the store that calls it"
        )


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _time_spec(until_s: float) -> _TimeSpec:
    return _TimeSpec(int(until_s), int(until_s % 1 * 1e9))


_c = ctypes.CDLL(None)
HAS_MUTEXES = sys.platform == "linux" and hasattr(_c, "pthread_mutexattr_setrobust")
