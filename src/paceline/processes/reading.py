"""Reads the processes of this machine from /proc.

    /proc/PID/stat      parent, group, session, state, ticks, flags       of all processes
    /proc/PID/status    owner, memory
    /proc/PID/cmdline, exe, environ, maps, fd, fdinfo, ns/pid             only of this user's
    /proc/PID/net/tcp   listening sockets: inodes -> ports

Reading disturbs no process. Fields that may not be read are empty, and a process that ends
meanwhile is left out. ``root`` is the root of the file system, so a recorded machine is read like a
live one. Slightly above 300 lines, since the kernel's texts are parsed in one place. This module
must not know what trains, nor what a ghost is.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import ConfigError
from .snapshot import Process, ProcessSnapshot

_ROOT = Path("/")
_TORCH = re.compile(r"/libtorch(_cpu|_python|_cuda|_hip|_xpu)?\.so")
_DEVICE = re.compile(r"/dev/(nvidia\d+|kfd|dri/renderD\d+|accel/?\w*\d+|habanalabs/\w+|vfio/\d+)")
_RANKS_FILE = "TORCHELASTIC_ERROR_FILE="
"""In the environment of torchrun's ranks: FOLDER/attempt_0/RANK/error.json. An attempt's folders
are made right before its ranks (torch.distributed.elastic.multiprocessing.DefaultLogsSpecs)."""
_FORK_NO_EXEC = 0x40
"""PF_FORKNOEXEC of include/linux/sched.h: the process still runs its parent's program."""
_LISTEN = "0A"
_INIT = 1
_STANDARD = ("0", "1", "2")
"""Descriptors that lead to whatever started a process, such as another user's cron, a terminal."""
_ONE_END = (os.O_RDONLY, os.O_WRONLY)


def look(root: Path = _ROOT, *, for_s: float = 0.0) -> ProcessSnapshot:
    """Read every process, and return them as a snapshot.

    Args:
        root: the root of the file system.
        for_s: if above 0, read twice, this many seconds apart, for the processor time that each
            process uses meanwhile.

    Raises:
        ConfigError: there is no /proc.
    """
    first = _look(root)
    if not for_s:
        return first
    time.sleep(for_s)
    second = _look(root)
    first_s = {process.key: process.cpu_s for process in first.processes}
    processes = tuple(
        replace(process, used_s=process.cpu_s - first_s[process.key])
        if process.key in first_s
        else process
        for process in second.processes
    )
    return replace(second, processes=processes, by_pid={})


def read_start(pid: int, root: Path = _ROOT) -> int | None:
    """Return the tick at which a process started; None if there is no such process."""
    fields = _stat(root / "proc" / str(pid))
    return int(fields[19]) if fields else None


@dataclass(slots=True)
class _Files:
    """Open files of a process, before they are compared with those of other processes."""

    devices: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    pipes: dict[str, set[int]] = field(default_factory=dict)
    sockets: set[str] = field(default_factory=set)
    error_file: str = ""
    """The error file that torchrun has given it, or the rank that started it."""


def _look(root: Path) -> ProcessSnapshot:
    proc = root / "proc"
    if sys.platform != "linux" or not (proc / "self").exists():
        raise ConfigError(
            f"processes are read from {proc}, which does not exist here; use ps and kill"
        )
    own = int(os.readlink(proc / "self"))
    namespace = _link(proc / str(own) / "ns" / "pid")
    owner = _owner(proc / str(own))
    uptime_s = float(_text(proc / "uptime").split()[0] or 0)
    booted_s = time.time() - uptime_s
    entries: list[tuple[Process, _Files]] = []
    closed = set()
    for folder in proc.iterdir():
        entry = _read(folder, owner, uptime_s, booted_s) if folder.name.isdigit() else None
        if entry is not None:
            entries.append(entry)
            if entry[0].owner == owner and _is_closed(folder):
                closed.add(entry[0].pid)
    processes = _completed(entries, proc, knows_all=not closed)
    return ProcessSnapshot(
        processes=tuple(sorted(processes, key=lambda process: process.pid)),
        own=own, owner=owner, namespace=namespace, unread=len(closed - {_INIT}),
    )  # fmt: skip


def _completed(
    entries: Sequence[tuple[Process, _Files]], proc: Path, *, knows_all: bool
) -> Iterator[Process]:
    """Yield the processes with the fields that depend on all other processes.

    Args:
        knows_all: whether every process that may hold another's pipe can be read.
    """
    ends: dict[str, list[tuple[int, set[int]]]] = {}
    for process, files in entries:
        for pipe, modes in files.pipes.items():
            ends.setdefault(pipe, []).append((process.pid, modes))
    networks: dict[str, dict[str, int]] = {}
    begun_by_ranks = _begun_by_ranks(entries)
    by_pid = {process.pid: (process, files) for process, files in entries}
    for process, files in entries:
        ports = _ports(proc / str(process.pid), networks) if files.sockets else {}
        yield replace(
            process,
            rank_s=None if process.pid in begun_by_ranks else process.rank_s,
            is_hosted=bool(files.error_file) and _is_hosted(process, files, by_pid),
            dead_pipes=sum(_is_dead(ends[pipe]) for pipe in files.pipes) if knows_all else 0,
            ports=_numbers(files.sockets, ports),
        )


def _begun_by_ranks(entries: Sequence[tuple[Process, _Files]]) -> set[int]:
    """Return the processes that a rank has started in a session of their own.

    They have the rank's environment, and with it the file for its error, but are younger.
    """
    leaders = sorted(
        (process.start_ticks, process.pid, files.error_file)
        for process, files in entries
        if files.error_file and process.session == process.pid
    )
    ranks: dict[str, int] = {}
    for _, pid, error_file in leaders:
        ranks.setdefault(error_file, pid)
    return {pid for _, pid, _ in leaders} - set(ranks.values())


def _is_hosted(
    process: Process, files: _Files, by_pid: Mapping[int, tuple[Process, _Files]]
) -> bool:
    """Whether its parent is torchrun, and not a program that adopts orphans."""
    if process.parent not in by_pid:
        return False
    parent, parent_files = by_pid[process.parent]
    return parent.is_python and parent_files.error_file != files.error_file


def _is_closed(folder: Path) -> bool:
    """Whether this is a living process that may not be read."""
    return not _link(folder / "ns" / "pid") and _stat(folder)[:1] not in ([], ["Z"], ["X"])


def _is_dead(holders: list[tuple[int, set[int]]]) -> bool:
    """Whether all holders of a pipe hold the same end of it."""
    modes = set[int]().union(*(modes for _, modes in holders))
    return len(modes) == 1 and modes <= {*_ONE_END}


def _read(
    folder: Path, owner: int, uptime_s: float, booted_s: float
) -> tuple[Process, _Files] | None:
    fields = _stat(folder)
    if not fields:
        return None
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    began_s = int(fields[19]) / ticks_per_s
    state, parent, group, session = fields[0], *map(int, fields[1:4])
    status = _rows(_text(folder / "status"))
    process = Process(
        pid=int(folder.name), start_ticks=int(fields[19]), parent=parent, group=group,
        session=session, owner=_owner(folder), state=state, name=status.get("Name", ""),
        is_forked=bool(int(fields[6]) & _FORK_NO_EXEC),
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks_per_s,
        age_s=max(0.0, uptime_s - began_s),
        memory_bytes=_kibibytes(status, "VmRSS"), shared_bytes=_kibibytes(status, "RssShmem"),
    )  # fmt: skip
    if process.owner != owner or state in "ZX":
        return process, _Files()
    maps = _text(folder / "maps")
    files = _files(folder)
    files.shared.update(_shared(line.partition("/")[2]) for line in maps.splitlines())
    files.shared.discard("")
    files.error_file = _error_file(folder)
    return replace(
        process,
        namespace=_link(folder / "ns" / "pid"),
        command=tuple(_text(folder / "cmdline").rstrip("\0").split("\0")),
        exe=_link(folder / "exe"),
        rank_s=_rank_s(folder, files.error_file, booted_s + began_s),
        has_torch=_TORCH.search(maps) is not None,
        devices=tuple(sorted(files.devices)), shared=tuple(sorted(files.shared)),
    ), files  # fmt: skip


def _error_file(folder: Path) -> str:
    """Return the path of the file that torchrun gives a rank for its error; "" for others."""
    variables = _text(folder / "environ").split("\0")
    found = (word.removeprefix(_RANKS_FILE) for word in variables if word.startswith(_RANKS_FILE))
    error_file = next(found, "")
    return error_file if error_file.startswith("/") else ""


def _rank_s(folder: Path, error_file: str, began_s: float) -> float | None:
    """Seconds from when torchrun made the folder for its ranks to ``began_s``; None without one."""
    if not error_file:
        return None
    root = folder.parent.parent
    try:
        made_s = (root / error_file.lstrip("/")).parent.parent.stat().st_mtime
    except OSError:
        return None
    return began_s - made_s


def _files(folder: Path) -> _Files:
    files = _Files()
    with contextlib.suppress(OSError):
        for descriptor in (folder / "fd").iterdir():
            target = _link(descriptor)
            if target.startswith("socket:["):
                files.sockets.add(target[8:-1])
            elif target.startswith("pipe:[") and descriptor.name not in _STANDARD:
                files.pipes.setdefault(target, set()).add(
                    _mode(folder / "fdinfo" / descriptor.name)
                )
            elif _DEVICE.fullmatch(target):
                files.devices.add(target)
            elif shared := _shared(target.removeprefix("/")):
                files.shared.add(shared)
    return files


def _shared(path: str) -> str:
    """Return the name of shared memory at a path without its first slash; empty if it is none."""
    path = path.removesuffix(" (deleted)")
    if path.startswith("dev/shm/"):
        return f"/{path}"
    return path if path.startswith("memfd:") else ""


def _mode(path: Path) -> int:
    flags = _rows(_text(path)).get("flags", "2")
    return int(flags, 8) & os.O_ACCMODE


def _numbers(sockets: set[str], ports: dict[str, int]) -> tuple[int, ...]:
    return tuple(sorted({ports[inode] for inode in sockets if inode in ports}))


def _ports(folder: Path, networks: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the ports of listening sockets by inode, in a process's network; read only once."""
    network = _link(folder / "ns" / "net")
    if network in networks:
        return networks[network]
    ports = networks.setdefault(network, {})
    for name in ("tcp", "tcp6"):
        for line in _text(folder / "net" / name).splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == _LISTEN:
                ports[words[9]] = int(words[1].rpartition(":")[2], 16)
    return ports


def _owner(folder: Path) -> int:
    """Return the number of a process's real user; -1 if the process is gone."""
    words = _rows(_text(folder / "status")).get("Uid", "").split()
    return int(words[0]) if words else -1


def _kibibytes(status: dict[str, str], name: str) -> int:
    words = status.get(name, "").split()
    return int(words[0]) * 1024 if words else 0


def _stat(folder: Path) -> list[str]:
    """Return the fields of stat from the state on; the name before it may hold brackets, too."""
    return _text(folder / "stat").rpartition(")")[2].split()


def _rows(text: str) -> dict[str, str]:
    return dict(_pairs(text))


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
