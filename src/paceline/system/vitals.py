"""The state of a process from the kernel: stopped, traced, and the CPU time that it has used.

    /proc/PID/stat               its state; CPU seconds of it and of its children that have ended
    /proc/PID/status             its tracer; the signals that it catches
    /proc/PID/task/PID/stat      the same of its first thread alone
    /proc/PID/task/*/children    its children, whose seconds count as its own

Reading needs no rights beyond those of the same user, and disturbs no process. Without /proc the
state is unknown. This module must not know why somebody asks.
"""

import contextlib
import enum
import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_MOST_PROCESSES = 256
"""Limit for a process and its descendants; the time of more is not counted."""


class ProcessState(enum.Enum):
    """What holds a process back, if anything."""

    AWAKE = "nothing holds it: it runs, or sleeps by its own wish"
    DISK = "it waits in the kernel, for a disk or a network file system"
    STOPPED = "a signal has stopped it"
    TRACED = "a debugger looks at it"
    ENDED = "it is over"
    UNKNOWN = "nobody can tell"


class Vitals(NamedTuple):
    """One reading.

    Attributes:
        cpu_s: CPU seconds of the process and all its descendants.
        tracer: the process that traces it; 0: none.
        is_running: whether one of them is running or runnable.
    """

    state: ProcessState
    cpu_s: float = 0.0
    tracer: int = 0
    is_running: bool = False


UNKNOWN = Vitals(ProcessState.UNKNOWN)


def read_vitals(pid: int) -> Vitals:
    """Return the current state of a process."""
    if pid <= 0 or not _PROC.joinpath("self").exists():
        return UNKNOWN
    fields = _fields(pid)
    if not fields:
        return Vitals(ProcessState.ENDED)
    tracer = int(_row(pid, "TracerPid") or 0)
    cpu_s, is_running = _use(pid)
    return Vitals(_state(fields[0], tracer), cpu_s, tracer, is_running)


class ThreadUse(NamedTuple):
    """CPU time and state of one thread.

    Attributes:
        is_asleep: sleeping in the kernel; it runs no code of its own.
    """

    cpu_s: float = 0.0
    is_asleep: bool = False


def read_thread(pid: int) -> ThreadUse:
    """Return the use of a process's first thread; all zero if unknown."""
    fields = _fields(f"{pid}/task/{pid}") if pid > 0 else []
    if not fields:
        return ThreadUse()
    ticks = sum(int(number) for number in fields[11:13])
    return ThreadUse(ticks / os.sysconf("SC_CLK_TCK"), is_asleep=fields[0] in "SD")


def catches(pid: int, signal: int) -> bool:
    """Whether this process catches a signal, which would not end it; True if unknown."""
    caught = _row(pid, "SigCgt")
    return not caught or bool(int(caught, 16) >> (signal - 1) & 1)


def _state(letter: str, tracer: int) -> ProcessState:
    if letter in "ZX":
        return ProcessState.ENDED
    if tracer:
        return ProcessState.TRACED
    return {"T": ProcessState.STOPPED, "t": ProcessState.TRACED, "D": ProcessState.DISK}.get(
        letter, ProcessState.AWAKE
    )


def _fields(whose: int | str) -> list[str]:
    """Return the fields of ``stat`` from the state on; [] if the process is gone."""
    try:
        return _PROC.joinpath(f"{whose}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _row(pid: int, name: str) -> str:
    """Return the value of a row of /proc/PID/status; empty if there is none."""
    try:
        text = _PROC.joinpath(f"{pid}/status").read_text()
    except OSError:
        return ""
    return next((row[1].strip() for row in _rows(text) if row[0] == name), "")


def _rows(text: str) -> list[list[str]]:
    return [line.split(":", 1) for line in text.splitlines() if ":" in line]


def _use(pid: int) -> tuple[float, bool]:
    """Return CPU time of a process and its descendants, and whether one of them runs."""
    ticks, num_seen, pending, is_running = 0, 0, [pid], False
    while pending and num_seen < _MOST_PROCESSES:
        current = pending.pop()
        num_seen += 1
        fields = _fields(current)
        ticks += sum(int(number) for number in fields[11:15])  # u, s, and those of children
        is_running |= fields[:1] == ["R"]
        pending += _children(current)
    return ticks / os.sysconf("SC_CLK_TCK"), is_running


def _children(pid: int) -> list[int]:
    """Return the children of a process; [] also if the kernel does not list them."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in _PROC.joinpath(f"{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, thread.joinpath("children").read_text().split())
    return children
