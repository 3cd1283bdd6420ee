"""Ends processes, first politely and then by force, and frees what they have left.

    chosen -> hold each (pidfd): is it still the one that was seen? -> TERM, and CONT to all
                                                                         | wait_s, or all are over
                                                                       KILL to those that are left
                                                                         |
    files in /dev/shm that they held and no process holds now -> removed; ports are checked again

A pidfd always refers to the same process: a later process with the same number never gets a signal.
Without pidfds (Linux before 5.3) the start of the process is read again before each signal. A
process group is never signalled, since it may hold other processes than parts. This module must not
know why a process is to be ended.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from .reading import read_start
from .snapshot import HOST, Process, ProcessKey, ProcessSnapshot

_AFTER_KILL_S = 2.0
"""How long to wait for a killed process; one that waits for a disk takes longer."""
_POLL_S = 0.02
_SHARED = Path("/dev/shm")
_OF_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")
"""Names by torch/csrc/.../StorageSharing: the process that made it, a random number, a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """What became of one process.

    Attributes:
        by: the last signal that it was sent; empty if none was.
        is_over: whether it is gone.
        reason: why it was not ended; empty if it was.
    """

    pid: int
    by: str
    is_over: bool
    reason: str = ""


class _Handle:
    """A handle of one process, valid even if its number is given to another one."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.by = ""
        self._fd = -1
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # the process is gone, or the kernel is old
                self._fd = os.pidfd_open(process.pid)

    def is_same(self) -> bool:
        """Whether its number is still its own; once true for a pidfd, that stays so."""
        return read_start(self.process.pid) == self.process.start_ticks

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process is over."""
        if not self.is_same():
            return
        with contextlib.suppress(ProcessLookupError):
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, number)
            else:
                os.kill(self.process.pid, number)
            self.by = self.by if number is signal.SIGCONT else number.name

    def is_over(self) -> bool:
        """Whether it has ended, even if its parent has not waited for it yet."""
        if self._fd >= 0:
            return bool(wait([self._fd], 0))
        return not self.is_same()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def end(targets: Sequence[Process], wait_s: float, say: Callable[[str], None]) -> list[ProcessEnd]:
    """Send TERM to each target, and KILL to those that are left after ``wait_s``.

    A process that is no longer the one that was seen is sent nothing.

    Returns:
        What became of each target, in their order.
    """
    handles = [_Handle(process) for process in targets]
    refused: dict[ProcessKey, str] = {}
    try:
        alive = [handle for handle in handles if handle.is_same()]
        for handle in alive:
            _try_signal(handle, signal.SIGTERM, refused)
        for handle in alive:  # a stopped process gets TERM only when it goes on
            _try_signal(handle, signal.SIGCONT, refused)
        remaining = _wait(alive, wait_s)
        if remaining:
            pids = ", ".join(str(handle.process.pid) for handle in remaining)
            say(f"KILL to {pids}, which did not end")
        for handle in remaining:
            _try_signal(handle, signal.SIGKILL, refused)
        _wait(remaining, _AFTER_KILL_S)
        return [
            ProcessEnd(
                pid=handle.process.pid, by=handle.by,
                is_over=handle not in alive or handle.is_over(),
                reason=_why_not_ended(handle, handle in alive, refused),
            )
            for handle in handles
        ]  # fmt: skip
    finally:
        for handle in handles:
            handle.close()


def _why_not_ended(handle: _Handle, was_alive: bool, refused: dict[ProcessKey, str]) -> str:
    if not was_alive:
        return "it had ended before"
    if not handle.is_over():
        waiting = "it waits in the kernel, and ends when that wait is over"
        return refused.get(handle.process.key, waiting)
    return ""


def _try_signal(handle: _Handle, number: signal.Signals, refused: dict[ProcessKey, str]) -> None:
    try:
        handle.send(number)
    except PermissionError:
        refused[handle.process.key] = "the system does not allow ending it"


def _wait(handles: Iterable[_Handle], most_s: float) -> list[_Handle]:
    """Wait until all are over, at most ``most_s``, and return those that are not."""
    end_s = time.monotonic() + most_s
    remaining = [handle for handle in handles if not handle.is_over()]
    while remaining and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        remaining = [handle for handle in remaining if not handle.is_over()]
    return remaining


# -- what they leave ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A file in /dev/shm that no process holds."""

    path: str
    num_bytes: int


def left_by(targets: Sequence[Process], now: ProcessSnapshot) -> list[Leftover]:
    """Return the files that the targets hold or held and no other process does.

    Empty if not all processes can be read. Shared memory without a name, such as memfds and
    unlinked files, is freed with its last process.
    """
    if now.unread:
        return []
    keys = {process.key for process in targets}
    held = {name for process in now.processes if process.key not in keys for name in process.shared}
    names = {name for process in targets for name in process.shared if name.startswith("/")}
    return [leftover for name in sorted(names - held) if (leftover := _leftover(name, now.owner))]


def left_before(now: ProcessSnapshot, folder: Path = _SHARED) -> list[Leftover]:
    """Return the files of trainings that ended earlier, by the pid that torch put in their names.

    Empty inside a container, since a process that has one open may be out of sight there.
    """
    if now.unread or now.namespace != HOST:
        return []
    held = {name for process in now.processes for name in process.shared}
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    leftovers = []
    for name in names:
        match = _OF_TORCH.fullmatch(name)
        path = str(folder / name)
        if match and int(match[1]) not in now.by_pid and path not in held:
            leftovers.append(_leftover(path, now.owner))
    return [leftover for leftover in leftovers if leftover is not None]


def _leftover(path: str, owner: int) -> Leftover | None:
    """Return a file as a leftover; None if it is gone, another user's, or possibly held by others.

    Users whose files cannot be seen may hold a file that is not private.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    is_private = status.st_uid == owner and not status.st_mode & 0o077
    if not is_private or not Path(path).is_file():
        return None
    return Leftover(path=path, num_bytes=status.st_blocks * 512)


def remove(leftovers: Iterable[Leftover]) -> list[Leftover]:
    """Remove files, and return those that could be removed."""
    removed = []
    for leftover in leftovers:
        with contextlib.suppress(OSError):
            os.unlink(leftover.path)
            removed.append(leftover)
    return removed
