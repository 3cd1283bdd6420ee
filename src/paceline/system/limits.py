"""What this process and all that it begins may take, and who has come to the end of it.

    /proc/self/cgroup -> our control group, and all that it lies in -> the one with the least room
        version 2    memory.max               memory.current           memory.events
        version 1    memory.limit_in_bytes    memory.usage_in_bytes    memory.oom_control
    ulimit -v, -d    of each process alone

An error that came of too little memory is told from others by `is_out_of_memory`, everywhere.

This module must not know what somebody wants memory or files for.
"""

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..plan import format_bytes
from .control_groups import MOUNT, control_groups

if sys.platform != "win32":
    import resource  # at once: where memory is short, there is no room for it later

_ROOT = Path("/")
_UNLIMITED = 1 << 60
_FILES = 48
"""That a launcher opens for itself, with what it has open in passing."""
_FILES_OF_WORKER = 3
_BYTES_OF_WORKER = 12 << 20
"""What a worker takes for itself before it has a model: 17 MB were measured, with 200 of them."""
_LOOK_S = 1.0
_RECENT_S = 10.0
"""Within which the end of who was killed is heard of: first all that it had is given back."""
_OUT_OF_MEMORY = (
    "not enough memory",
    "cannot allocate memory",
    "can't allocate memory",
    "out of memory",
)
"""What the system and the allocators of torch say where they find no more."""
_NOT_MAPPED = "failed to map segment"
"""What the system says where a library finds no room; that there is none "in static TLS block" is
another matter."""


class Limit(NamedTuple):
    """Of memory.

    Attributes:
        most_bytes: what may be taken in all.
        free_bytes: what is left of it.
        name: whose it is, for people.
    """

    most_bytes: int
    free_bytes: int
    name: str

    def __str__(self) -> str:
        return f"{format_bytes(self.most_bytes)} by {self.name}"


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can still be taken: the machine's, or a control group's where that is less."""
    return min([_free_bytes(root), *(limit.free_bytes for limit in group_limits(root))])


def group_limits(root: Path = _ROOT) -> list[Limit]:
    """Of our control group and of all that it lies in, as far as they have one."""
    return [limit for folder in _groups(root) if (limit := _limit_of(folder, root)) is not None]


def process_limits() -> list[Limit]:
    """Of this process alone: ulimit -v, ulimit -d."""
    if sys.platform == "win32":
        return []
    found = []
    for number, name in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")):
        most = resource.getrlimit(number)[0]
        if most != resource.RLIM_INFINITY:
            found.append(Limit(most, most, name))
    return found


def describe_limits(root: Path = _ROOT) -> str:
    """How much memory may be taken, and who says so; empty where nothing but the machine does."""
    limits = sorted([*group_limits(root), *process_limits()])
    return ", ".join(map(str, limits[:2]))


def count_kills(root: Path = _ROOT) -> int:
    """How often the kernel has ended a process here because memory ran out, since ever."""
    own = next(_groups(root), None)
    for name in ("memory.events", "memory.oom_control"):
        if own is not None and (count := _row(own / name, "oom_kill")) is not None:
            return count
    return _row(root / "proc/vmstat", "oom_kill") or 0


def allow(num_workers: int) -> None:
    """See that so many workers can be begun, and let this process open what it needs for them.

    Raises:
        ConfigError: they cannot.
    """
    needed, free = num_workers * _BYTES_OF_WORKER, available_bytes()
    if needed > free:
        limits = describe_limits()
        raise ConfigError(
            f"{num_workers} workers need {format_bytes(needed)} at least, and {format_bytes(free)} "
            f"are free{f' (allowed: {limits})' if limits else ''}; use fewer workers"
        )
    _allow_files(num_workers)


def _allow_files(num_workers: int) -> None:
    if sys.platform == "win32":
        return
    needed = _FILES + _FILES_OF_WORKER * num_workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{num_workers} worker{'s' * (num_workers != 1)} need {needed} open files, and {hard} "
            "are allowed (ulimit -n); raise that, or use fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's, the system's or torch's.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        True
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True  # by its name: torch, whose class it is, is not loaded for it
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    if isinstance(error, ImportError | OSError):  # of a library
        return _NOT_MAPPED in text
    return any(words in text for words in _OUT_OF_MEMORY)


class Toll:
    """Whom the kernel has ended a moment ago, because memory ran out.

    It counts its kills in our group, or on the machine, and says nothing of whose they were: each
    is taken for the next end that is heard of, and for none where nobody's is soon enough.

    Args:
        now_s: by the clock of all calls.
    """

    def __init__(self, now_s: float) -> None:
        self._count = count_kills()
        self._seen_s: list[float] = []
        """When each kill was seen that is no end's yet."""
        self._next_s = now_s + _LOOK_S

    def look(self, now_s: float) -> None:
        """Date what is new; to be called again and again, it looks once in a while."""
        if now_s >= self._next_s:
            self._count_new(now_s)

    def _count_new(self, now_s: float) -> None:
        self._next_s = now_s + _LOOK_S
        before, self._count = self._count, count_kills()
        self._seen_s += [now_s] * (self._count - before)
        self._seen_s = [time_s for time_s in self._seen_s if now_s - time_s <= _RECENT_S]

    def explain(self, now_s: float) -> str:
        """Why somebody who was killed was, to be told after ``killed``; empty: not for memory."""
        self._count_new(now_s)
        if not self._seen_s:
            return ""
        self._seen_s.pop(0)
        limits = describe_limits()
        return f", out of memory ({f'allowed: {limits}' if limits else 'the machine has no more'})"


# -- control groups -----------------------------------------------------------------------------


def _groups(root: Path) -> Iterator[Path]:
    """Folders of our control group and of those that it lies in, the narrowest first."""
    for folder in control_groups("memory", root):
        if (folder / "memory.current").exists() or (folder / "memory.usage_in_bytes").exists():
            yield folder


def _limit_of(folder: Path, root: Path) -> Limit | None:
    """What files keep in memory only as long as nobody else wants it is free."""
    for most_name, used_name, kept_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, used = _number(folder / most_name), _number(folder / used_name)
        if most is not None and used is not None and most < _UNLIMITED:
            kept = _row(folder / "memory.stat", kept_name) or 0
            name = f"the control group {folder.relative_to(root / MOUNT)}"
            return Limit(most, max(0, most - max(0, used - kept)), name)
    return None


def _free_bytes(root: Path) -> int:
    """Of the machine."""
    kibibytes = _row(root / "proc/meminfo", "MemAvailable:")
    return sys.maxsize if kibibytes is None else kibibytes * 1024


def _number(path: Path) -> int | None:
    """None: there is no such file, or it says ``max``."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _row(path: Path, name: str) -> int | None:
    """The number behind this word."""
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
