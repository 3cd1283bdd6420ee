"""Locks between processes and threads that a death does not leave locked.

On Linux they are robust mutexes of the C library: a futex that holds its owner's thread, which the
kernel opens when that thread ends in any way. Elsewhere a record lock of the file, which the
kernel opens too, stands beside a lock of this process. Neither says whether what it guards is
whole: that is for the words which the owner keeps. This module must not know what is guarded.

    [ mutex: 64 bytes ][ owner's process: a word | 7 words for whoever uses the lock ]
"""

import ctypes
import errno
import fcntl
import os
import sys
import threading
import time
from typing import Protocol

from ..errors import ConfigError, LinkError
from ..store.memory import WORD_BYTES
from ..store.region import Region

LOCK_BYTES = 128
FREE_WORDS = 9
"""The first word after a lock's own, counted from the lock's first."""

_MUTEX_BYTES = 64
_SHARED, _ROBUST, _ERRORCHECK = 1, 1, 2
_SLICE_S = 0.5
"""Between two looks at pending signals while waiting: Ctrl-C is answered in this time."""
_POLL_S = 1e-4


class Lock(Protocol):
    """Held by one thread of one process; free again when its holder ends."""

    def acquire(self) -> None:
        """Wait for it.

        Raises:
            LinkError: somebody has held it for ``patience_s``: it is stopped or hangs.
            ConfigError: this thread holds it already.
        """

    def try_acquire(self) -> bool:
        """Take it if it is free."""

    def release(self) -> None: ...


class MutexLock:
    """A robust mutex at byte ``offset``, which ``prepare_lock`` has made."""

    def __init__(self, region: Region, offset: int, name: str, patience_s: float) -> None:
        self._region = region
        self._address = ctypes.c_void_p(region.address + offset)
        self._owner = (offset + _MUTEX_BYTES) // WORD_BYTES
        self._name = name
        self._patience_s = patience_s
        self._holder = 0

    def try_acquire(self) -> bool:
        return self._has_got_it(_c.pthread_mutex_trylock(self._address))

    def acquire(self) -> None:
        if self.try_acquire():
            return
        end = time.monotonic() + self._patience_s
        while (left_s := end - time.monotonic()) > 0:
            until = time.time() + min(left_s, _SLICE_S)
            spec = _TimeSpec(int(until), int(until % 1 * 1e9))
            if self._has_got_it(_c.pthread_mutex_timedlock(self._address, ctypes.byref(spec))):
                return
        raise _held_too_long(self._name, self._region.words[self._owner], self._patience_s)

    def release(self) -> None:
        self._holder = 0
        _c.pthread_mutex_unlock(self._address)

    def _has_got_it(self, answer: int) -> bool:
        if answer in (errno.EBUSY, errno.ETIMEDOUT):
            return False
        if answer == errno.EOWNERDEAD:
            _c.pthread_mutex_consistent(self._address)
        elif answer == errno.EDEADLK:
            # Ours. With a holder: we are called from inside. Without one: an exception (Ctrl-C)
            # fell between taking the mutex and noting it, and we go on from there.
            if self._holder == threading.get_ident():
                raise _held_by_us(self._name)
        elif answer:
            raise LinkError(f"{self._name} of the store cannot be locked: {os.strerror(answer)}")
        self._holder = threading.get_ident()
        self._region.words[self._owner] = os.getpid()
        return True


class RecordLock:
    """A record lock on bytes ``[offset, offset + 1)`` of the region's file.

    Closing any descriptor of that file in this process opens it: one process attaches once.
    """

    def __init__(self, region: Region, offset: int, name: str, patience_s: float) -> None:
        self._region = region
        self._offset = offset
        self._owner = (offset + _MUTEX_BYTES) // WORD_BYTES
        self._name = name
        self._patience_s = patience_s
        self._pid = 0
        self._here = threading.Lock()
        self._holder = 0

    def try_acquire(self) -> bool:
        if self._pid != os.getpid():  # a fork copies the state of a lock, but not its holder
            self._here, self._pid, self._holder = threading.Lock(), os.getpid(), 0
        if not self._here.acquire(blocking=False):
            if self._holder == threading.get_ident():
                raise _held_by_us(self._name)
            return False
        try:
            fcntl.lockf(self._region.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._offset)
        except BlockingIOError:
            self._here.release()
            return False
        self._holder = threading.get_ident()
        self._region.words[self._owner] = self._pid
        return True

    def acquire(self) -> None:
        end = time.monotonic() + self._patience_s
        while not self.try_acquire():
            if time.monotonic() > end:
                raise _held_too_long(self._name, self._region.words[self._owner], self._patience_s)
            time.sleep(_POLL_S)

    def release(self) -> None:
        self._holder = 0
        fcntl.lockf(self._region.fd, fcntl.LOCK_UN, 1, self._offset)
        self._here.release()


def prepare_lock(region: Region, offset: int) -> None:
    """Make a free lock at ``offset`` (a multiple of 64, LOCK_BYTES zeroed), before it is shared."""
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


def open_lock(region: Region, offset: int, name: str, patience_s: float) -> Lock:
    """The lock at ``offset`` as this process holds it; ``name`` says in messages what it guards."""
    kind = MutexLock if HAS_MUTEXES else RecordLock
    return kind(region, offset, name, patience_s)


def _held_too_long(name: str, pid: int, patience_s: float) -> LinkError:
    return LinkError(
        f"{name} of the store has been held by process {pid} for {patience_s:g} s: it is stopped "
        "or hangs in an updater; when it ends, the others go on by themselves"
    )


def _held_by_us(name: str) -> ConfigError:
    return ConfigError(
        f"{name} of the store is already held by this thread: an updater may change `stored`, "
        "but must not push to, pull from or init in the store that calls it"
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_c = ctypes.CDLL(None)
HAS_MUTEXES = sys.platform == "linux" and hasattr(_c, "pthread_mutexattr_setrobust")
