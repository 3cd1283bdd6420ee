"""Ends processes, politely and then firmly, and frees what they have left.

    chosen -> hold each (pidfd): is it still the one that was seen? -> TERM, and CONT to all
                                                                         | wait_s, or all are over
                                                                       KILL to what is left
                                                                         |
           files in /dev/shm that they held and nobody holds now -> removed; ports looked at again

A pidfd is of one process for ever: whoever is given its number later is sent nothing, however long
we wait. Where there are none (Linux before 5.3) its start is read again before each signal. No
group of processes is ever signalled, since others than parts may be in it. This module must not
know why something is to be ended.
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
"""The kernel takes a killed process's memory away; one that waits for a disk takes longer."""
_POLL_S = 0.02
_SHARED = Path("/dev/shm")
_OF_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")
"""torch/csrc/.../StorageSharing: the process that made it, a random number, a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """What became of one process.

    Attributes:
        by: the last signal that it was sent; empty: none was.
        is_over: whether it is gone.
    """

    pid: int
    by: str
    is_over: bool
    reason: str = ""


class _Held:
    """One process, which no other can take the place of."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.by = ""
        self._fd = -1
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # it is gone, or the kernel is old
                self._fd = os.pidfd_open(process.pid)

    def is_same(self) -> bool:
        """Whether its number is still its own. Asked after it is held, that stays so."""
        return read_start(self.process.pid) == self.process.start_ticks

    def send(self, number: signal.Signals) -> None:
        """A signal, unless it is over."""
        if not self.is_same():
            return
        with contextlib.suppress(ProcessLookupError):
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, number)
            else:
                os.kill(self.process.pid, number)
            self.by = self.by if number is signal.SIGCONT else number.name

    def is_over(self) -> bool:
        """Whether it has ended; its parent may not have asked for it yet."""
        if self._fd >= 0:
            return bool(wait([self._fd], 0))
        return not self.is_same()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def end(targets: Sequence[Process], wait_s: float, say: Callable[[str], None]) -> list[ProcessEnd]:
    """TERM to each, KILL to those that are there after ``wait_s``.

    Returns:
        One for each, in their order. Who is no longer the process that was seen is sent nothing.
    """
    held = [_Held(process) for process in targets]
    refused: dict[ProcessKey, str] = {}
    try:
        ours = [one for one in held if one.is_same()]
        for one in ours:
            _try(one, signal.SIGTERM, refused)
        for one in ours:
            _try(one, signal.SIGCONT, refused)  # who is stopped hears TERM when it goes on
        left = _wait(ours, wait_s)
        if left:
            say(f"KILL to {', '.join(str(one.process.pid) for one in left)}, which did not end")
        for one in left:
            _try(one, signal.SIGKILL, refused)
        _wait(left, _AFTER_KILL_S)
        return [
            ProcessEnd(
                pid=one.process.pid, by=one.by, is_over=one not in ours or one.is_over(),
                reason=_said(one, one in ours, refused),
            )
            for one in held
        ]  # fmt: skip
    finally:
        for one in held:
            one.close()


def _said(one: _Held, was_ours: bool, refused: dict[ProcessKey, str]) -> str:
    if not was_ours:
        return "it had ended before"
    if not one.is_over():
        return refused.get(one.process.key, "it waits in the kernel, and ends when that lets it go")
    return ""


def _try(one: _Held, number: signal.Signals, refused: dict[ProcessKey, str]) -> None:
    try:
        one.send(number)
    except PermissionError:
        refused[one.process.key] = "the system does not allow to end it"


def _wait(held: Iterable[_Held], most_s: float) -> list[_Held]:
    """Those that are not over by then."""
    end_s = time.monotonic() + most_s
    left = [one for one in held if not one.is_over()]
    while left and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        left = [one for one in left if not one.is_over()]
    return left


# -- what they leave ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A file in /dev/shm that nobody holds."""

    path: str
    num_bytes: int


def left_by(targets: Sequence[Process], now: ProcessSnapshot) -> list[Leftover]:
    """Files that these hold or have held, and that nobody else does. None, where not all is seen.

    What has no name, as memfds and files that were unlinked, is freed with its last process.
    """
    if now.unread:
        return []
    keys = {one.key for one in targets}
    held = {name for one in now.processes if one.key not in keys for name in one.shared}
    names = {name for one in targets for name in one.shared if name.startswith("/")}
    return [found for name in sorted(names - held) if (found := _leftover(name, now.owner))]


def left_before(now: ProcessSnapshot, folder: Path = _SHARED) -> list[Leftover]:
    """Files of trainings that were ended earlier, by the number that torch puts into their names.

    None inside of a container: a process that has one open may be out of sight there.
    """
    if now.unread or now.namespace != HOST:
        return []
    held = {name for one in now.processes for name in one.shared}
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = []
    for name in names:
        match = _OF_TORCH.fullmatch(name)
        path = str(folder / name)
        if match and int(match[1]) not in now.by_pid and path not in held:
            found.append(_leftover(path, now.owner))
    return [one for one in found if one is not None]


def _leftover(path: str, owner: int) -> Leftover | None:
    """None: it is gone, another's, or others might hold it whose files are not in sight."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    is_private = found.st_uid == owner and not found.st_mode & 0o077
    if not is_private or not Path(path).is_file():
        return None
    return Leftover(path=path, num_bytes=found.st_blocks * 512)


def remove(leftovers: Iterable[Leftover]) -> list[Leftover]:
    """Those that could be removed."""
    removed = []
    for one in leftovers:
        with contextlib.suppress(OSError):
            os.unlink(one.path)
            removed.append(one)
    return removed
