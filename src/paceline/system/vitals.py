"""What a process does, as the kernel tells it: stopped, traced, and the CPU time that it has used.

    /proc/PID/stat               its state; CPU seconds of it and of its children that have ended
    /proc/PID/status             who traces it; which signals it catches
    /proc/PID/task/PID/stat      the same of its first thread alone
    /proc/PID/task/*/children    whom it has begun, whose seconds count as its own

Reading needs no rights beyond those of the same user, and disturbs nobody. Where there is no /proc
nothing is known, and that is the answer. This module must not know why somebody asks.
"""

import contextlib
import enum
import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_MOST_PROCESSES = 256
"""Of one family; the time of more is not counted."""


class ProcessState(enum.Enum):
    """What holds a process, if anything does."""

    AWAKE = "nothing holds it: it runs, or sleeps by its own wish"
    DISK = "it waits in the kernel, for a disk or a network file system"
    STOPPED = "a signal has stopped it"
    TRACED = "a debugger looks at it"
    ENDED = "it is over"
    UNKNOWN = "nobody can tell"


class Vitals(NamedTuple):
    """One reading.

    Attributes:
        cpu_s: seconds of CPU time, of the process and of all that descend from it.
        tracer: the process that traces it; 0: none does.
        is_running: whether one of them runs, or would if it was given a core.
    """

    state: ProcessState
    cpu_s: float = 0.0
    tracer: int = 0
    is_running: bool = False


UNKNOWN = Vitals(ProcessState.UNKNOWN)


def read_vitals(pid: int) -> Vitals:
    """What this process does now."""
    if pid <= 0 or not _PROC.joinpath("self").exists():
        return UNKNOWN
    fields = _fields(pid)
    if not fields:
        return Vitals(ProcessState.ENDED)
    tracer = int(_row(pid, "TracerPid") or 0)
    cpu_s, is_running = _use(pid)
    return Vitals(_state(fields[0], tracer), cpu_s, tracer, is_running)


class ThreadUse(NamedTuple):
    """Of one thread.

    Attributes:
        is_asleep: in the kernel, until something happens; it runs no code of its own.
    """

    cpu_s: float = 0.0
    is_asleep: bool = False


def read_thread(pid: int) -> ThreadUse:
    """What the first thread of this process does; all zero where nobody can tell."""
    fields = _fields(f"{pid}/task/{pid}") if pid > 0 else []
    if not fields:
        return ThreadUse()
    ticks = sum(int(number) for number in fields[11:13])
    return ThreadUse(ticks / os.sysconf("SC_CLK_TCK"), is_asleep=fields[0] in "SD")


def catches(pid: int, signal: int) -> bool:
    """Whether a signal is caught by this process, and would not end it; True: nobody can tell."""
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
    """Of its file ``stat``, from the state on; [] where there is no such process any more."""
    try:
        return _PROC.joinpath(f"{whose}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _row(pid: int, name: str) -> str:
    """The value of a row of /proc/PID/status; empty where there is none."""
    try:
        text = _PROC.joinpath(f"{pid}/status").read_text()
    except OSError:
        return ""
    return next((row[1].strip() for row in _rows(text) if row[0] == name), "")


def _rows(text: str) -> list[list[str]]:
    return [line.split(":", 1) for line in text.splitlines() if ":" in line]


def _use(pid: int) -> tuple[float, bool]:
    """CPU time of a process, its children that have ended, and all that live; whether one runs."""
    ticks, seen, ahead, is_running = 0, 0, [pid], False
    while ahead and seen < _MOST_PROCESSES:
        one = ahead.pop()
        seen += 1
        fields = _fields(one)
        ticks += sum(int(number) for number in fields[11:15])  # u, s, and those of children
        is_running |= fields[:1] == ["R"]
        ahead += _children(one)
    return ticks / os.sysconf("SC_CLK_TCK"), is_running


def _children(pid: int) -> list[int]:
    """Whom this process has begun; [] also where the kernel does not tell."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in _PROC.joinpath(f"{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, thread.joinpath("children").read_text().split())
    return found
