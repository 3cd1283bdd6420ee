"""Memory and file limits of this process and its children, and kills for lack of memory.

    /proc/self/cgroup -> our control group and its ancestors -> the one with the least room
        version 2    memory.max               memory.current           memory.events
        version 1    memory.limit_in_bytes    memory.usage_in_bytes    memory.oom_control
    ulimit -v, -d    of each process alone

`is_out_of_memory` recognises errors for lack of memory, everywhere.

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
    import resource  # at once: when memory is short, there is no room for it later

_ROOT = Path("/")
_UNLIMITED = 1 << 60
_FILES = 48
"""Files that a launcher opens for itself, including short-lived ones."""
_FILES_OF_WORKER = 3
_BYTES_OF_WORKER = 12 << 20
"""Memory of a worker before it has a model: 17 MB were measured, with 200 of them."""
_LOOK_S = 1.0
_RECENT_S = 10.0
"""Within this time the end of a killed process is reported: its memory is freed first."""
_OUT_OF_MEMORY = (
    "not enough memory",
    "cannot allocate memory",
    "can't allocate memory",
    "out of memory",
)
"""Messages of the system and of torch's allocators when memory runs out."""
_NOT_MAPPED = "failed to map segment"
"""The system's message if a library does not fit in memory; "in static TLS block" is a different
error."""


class Limit(NamedTuple):
    """A memory limit.

    Attributes:
        most_bytes: the limit.
        free_bytes: what is left of it.
        name: who sets it, for people.
    """

    most_bytes: int
    free_bytes: int
    name: str

    def __str__(self) -> str:
        return f"{format_bytes(self.most_bytes)} by {self.name}"


def available_bytes(root: Path = _ROOT) -> int:
    """Return the available memory: the machine's, or a control group's if that is less."""
    return min([_free_bytes(root), *(limit.free_bytes for limit in group_limits(root))])


def group_limits(root: Path = _ROOT) -> list[Limit]:
    """Return the limits of our control group and its ancestors."""
    return [limit for folder in _groups(root) if (limit := _limit_of(folder, root)) is not None]


def process_limits() -> list[Limit]:
    """Return the limits of this process alone: ulimit -v, ulimit -d."""
    if sys.platform == "win32":
        return []
    limits = []
    for number, name in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")):
        most = resource.getrlimit(number)[0]
        if most != resource.RLIM_INFINITY:
            limits.append(Limit(most, most, name))
    return limits


def describe_limits(root: Path = _ROOT) -> str:
    """Describe the memory limits and who sets them; empty if only the machine limits."""
    limits = sorted([*group_limits(root), *process_limits()])
    return ", ".join(map(str, limits[:2]))


def count_kills(root: Path = _ROOT) -> int:
    """Return how many processes the kernel has killed here for lack of memory so far."""
    own = next(_groups(root), None)
    for name in ("memory.events", "memory.oom_control"):
        if own is not None and (count := _row(own / name, "oom_kill")) is not None:
            return count
    return _row(root / "proc/vmstat", "oom_kill") or 0


def allow(num_workers: int) -> None:
    """Check that so many workers can be started, and raise the limit of open files for them.

    Raises:
        ConfigError: they cannot be started.
    """
    needed, free = num_workers * _BYTES_OF_WORKER, available_bytes()
    if needed > free:
        limits = describe_limits()
        raise ConfigError(
            f"{num_workers} workers need at least {format_bytes(needed)}, but {format_bytes(free)} "
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
            f"{num_workers} worker{'s' * (num_workers != 1)} need {needed} open files, but {hard} "
            "are allowed (ulimit -n); raise that limit, or use fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, the system or torch means that memory ran out.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        True
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True  # by name, so that torch is not imported for its class
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    if isinstance(error, ImportError | OSError):  # of a library
        return _NOT_MAPPED in text
    return any(words in text for words in _OUT_OF_MEMORY)


class Toll:
    """Recent kills by the kernel for lack of memory.

    The kernel counts kills in our group or on the machine, but not whose they were: each kill is
    matched with the next process end that is reported, or dropped if none follows soon enough.

    Args:
        now_s: current time, by the clock of all calls.
    """

    def __init__(self, now_s: float) -> None:
        self._count = count_kills()
        self._seen_s: list[float] = []
        """Times of the kills that are not yet matched with a process."""
        self._next_s = now_s + _LOOK_S

    def look(self, now_s: float) -> None:
        """Record new kills; may be called often, it looks once a second."""
        if now_s >= self._next_s:
            self._count_new(now_s)

    def _count_new(self, now_s: float) -> None:
        self._next_s = now_s + _LOOK_S
        before, self._count = self._count, count_kills()
        self._seen_s += [now_s] * (self._count - before)
        self._seen_s = [time_s for time_s in self._seen_s if now_s - time_s <= _RECENT_S]

    def explain(self, now_s: float) -> str:
        """Return the reason of a kill, to follow ``killed``; empty: not for lack of memory."""
        self._count_new(now_s)
        if not self._seen_s:
            return ""
        self._seen_s.pop(0)
        limits = describe_limits()
        return f", out of memory ({f'allowed: {limits}' if limits else 'the machine has no more'})"


# -- control groups -----------------------------------------------------------------------------


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of our control group and its ancestors, innermost first."""
    for folder in control_groups("memory", root):
        if (folder / "memory.current").exists() or (folder / "memory.usage_in_bytes").exists():
            yield folder


def _limit_of(folder: Path, root: Path) -> Limit | None:
    """Return a group's limit; memory of inactive file cache counts as free."""
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
    """Return the machine's available memory."""
    kibibytes = _row(root / "proc/meminfo", "MemAvailable:")
    return sys.maxsize if kibibytes is None else kibibytes * 1024


def _number(path: Path) -> int | None:
    """Return the number in a file; None: there is no such file, or it says ``max``."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _row(path: Path, name: str) -> int | None:
    """Return the number after this word."""
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
