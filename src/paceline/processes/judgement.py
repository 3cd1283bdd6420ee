"""Decides what each process does for a training, which work it belongs to, and why it is a ghost.

    ProcessSnapshot ---> role of each ---> has it lost its parent? ---> why it is a ghost, or ""
                                                                         |
                                   `targets.py`: may it be ended, or why not

A part is a process that is of no use alone. Its real parent runs the same program (a forked process
has its parent's), so a parent that runs another program has adopted it; the words of a command
prove nothing, since a program may write its own. A forked part may be a daemon that has left its
parent on purpose. Daemons are recognized by what they have: a session without its leader and
without groups, a port, work, and no pipe whose other end is dead. This module is pure; it must not
know how processes are read or ended.
"""

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .snapshot import Process, ProcessKey, ProcessSnapshot

IDLE_SHARE = 0.01
"""The share of one core below which a process is idle; a Python that only waits uses less."""
_INIT = 1
_NOTEBOOKS = ("ipykernel", "colab_kernel_launcher", "jupyter", "marimo", "xpython")
_SPAWNED = "multiprocessing.spawn"
_COMPILER = "torch/_inductor/compile_worker"
_FORKED_FROM = "multiprocessing.forkserver"
_SERVER = "paceline.engines.local.forkserver"
_RANK_S, _LOST_RANK_S = 5.0, 1.0
"""Torchrun starts its ranks within this time, also on a busy machine. If torchrun has ended, less
is allowed: a program that a rank has started may be all that is left, and is not a ghost."""
_LOADER = "pt_data_worker"
_COMMANDS = ("train", "launch", "compare", "bench", "tune", "plan", "partition", "verify")


class Role(enum.Enum):
    """What a process does for a training."""

    SCRIPT = "script"
    NOTEBOOK = "notebook"
    LAUNCHER = "launcher"
    FORK_SERVER = "fork server"
    WORKER = "worker"
    RANK = "rank"
    LOADER_WORKER = "loader worker"
    SPAWNED = "spawned part"
    FORKED = "forked part"
    OTHER = "no training"


class Condition(enum.Enum):
    """What state a training process is in."""

    AT_WORK = "at work"
    IDLE = "idle"
    STOPPED = "stopped"
    DETACHED = "detached"
    GHOST = "ghost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A training process with its role and condition.

    Attributes:
        leader: the number of the script, launcher or notebook that it is a part of; its own number
            if it is not a part, or if the leader is gone.
        is_parent_alive: whether it still has the parent that started it, if it needs one.
        reason: why it is a ghost; empty if it is none.
    """

    process: Process
    role: Role
    condition: Condition
    leader: int
    is_parent_alive: bool
    reason: str = ""


def judge(snapshot: ProcessSnapshot, for_s: float = 0.0) -> list[Judged]:
    """Return this user's training processes, without the one that reads and its ancestors.

    Args:
        for_s: the seconds between the snapshot's two readings; if 0, no process counts as idle.
    """
    reasons = ghosts(snapshot, for_s)
    judged = []
    for process in snapshot.processes:
        role = role_of(process)
        if role is Role.OTHER or process.pid in ourselves(snapshot) or foreign(process, snapshot):
            continue
        reason = reasons.get(process.key, "")
        judged.append(
            Judged(
                process=process, role=role, leader=_leader(process, snapshot), reason=reason,
                condition=_condition(process, role, bool(reason), snapshot, for_s),
                is_parent_alive=not has_lost_parent(process, snapshot),
            )
        )  # fmt: skip
    return judged


def role_of(process: Process) -> Role:
    """Return a process's role, by its program, its name and what it has loaded."""
    command = " ".join(process.command)
    if process.is_python and _is_paceline(process.command) and not _is_part(process):
        return Role.LAUNCHER
    if not (process.has_torch or _holds_as_python(process)):
        return Role.OTHER
    if process.is_forked and process.name == _LOADER:
        return Role.LOADER_WORKER
    if any(word.rpartition("/")[2].startswith(_NOTEBOOKS) for word in process.command):
        return Role.NOTEBOOK
    if process.is_forked:
        return Role.WORKER if _SERVER in command else Role.FORKED
    if _SERVER in command or _FORKED_FROM in command:
        return Role.FORK_SERVER
    if _SPAWNED in command or _COMPILER in command:
        return Role.LOADER_WORKER if process.name == _LOADER else Role.SPAWNED
    if process.name == "pt_elastic" or "torch.distributed.run" in command:
        return Role.LAUNCHER
    return Role.RANK if _is_rank(process) else Role.SCRIPT


def _is_part(process: Process) -> bool:
    """Whether a process with Paceline's command is a fork or a rank (``--nodes``), no launcher."""
    return process.is_forked or _is_rank(process)


def _is_rank(process: Process) -> bool:
    """Whether torchrun itself started it: a rank leads its session, and is as old as its folder.

    A program that a rank has started has the rank's variables, and may have a session of its own. A
    rank's command is whatever the user chose (``-m``, ``--no-python``), so it proves nothing.
    """
    began_s = process.rank_s
    most_s = _RANK_S if process.is_hosted else _LOST_RANK_S
    return process.pid == process.session and began_s is not None and abs(began_s) < most_s


def _is_paceline(command: tuple[str, ...]) -> bool:
    words = [word.rpartition("/")[2] for word in command]
    return any(a == "paceline" and b in _COMMANDS for a, b in itertools.pairwise(words))


def _holds_as_python(process: Process) -> bool:
    """Whether a Python has an accelerator open; display servers and browsers have one, too."""
    return bool(process.devices) and process.is_python


_BELOW = (Role.WORKER, Role.LOADER_WORKER, Role.SPAWNED, Role.FORKED)
"""Parts that end with the process that started them."""
PARTS = (Role.FORK_SERVER, Role.RANK, *_BELOW)
"""Roles that are of no use alone."""


def has_lost_parent(process: Process, snapshot: ProcessSnapshot) -> bool:
    """Whether a part has been adopted by a process that cannot have started it."""
    role = role_of(process)
    if role not in PARTS:
        return False
    parent = snapshot.by_pid.get(process.parent)
    if parent is None or parent.start_ticks > process.start_ticks:
        return True
    if not (parent.exe and process.exe):  # unreadable: it may be the real parent; init is not
        return parent.pid == _INIT
    if role is Role.LOADER_WORKER:  # its loader is in a process with torch, or in its fork server
        return not (parent.has_torch or _FORKED_FROM in " ".join(parent.command))
    if process.is_forked:  # so its real parent runs the same program
        return parent.exe != process.exe
    return not (parent.is_python or parent.has_torch)


def ghosts(snapshot: ProcessSnapshot, for_s: float = 0.0) -> dict[ProcessKey, str]:
    """Return the reason why each ghost is one."""
    reasons = {
        process.key: reason
        for process in snapshot.processes
        if has_lost_parent(process, snapshot) and (reason := _why(process, snapshot, for_s))
    }
    while added := dict(_with_parent(snapshot, reasons)):
        reasons |= added
    return reasons


def _with_parent(
    snapshot: ProcessSnapshot, reasons: dict[ProcessKey, str]
) -> Iterator[tuple[ProcessKey, str]]:
    """Yield parts whose parent is a ghost and that are not yet known to be ghosts."""
    for process in snapshot.processes:
        parent = snapshot.by_pid.get(process.parent)
        if (
            parent is not None and parent.key in reasons and process.key not in reasons
            and role_of(process) in _BELOW and not has_lost_parent(process, snapshot)
        ):  # fmt: skip
            yield process.key, f"a {role_of(process).value} of {parent.pid}, which is a ghost"


def _why(process: Process, snapshot: ProcessSnapshot, for_s: float) -> str:
    """Return why a part that has lost its parent is a ghost; empty if that may be intended."""
    stopped = ", and it was stopped" if process.state in "Tt" else ""
    role = role_of(process)
    if role is Role.LOADER_WORKER:
        return f"a loader worker whose training has ended{stopped}"
    if role is Role.SPAWNED:
        return f"a part of a script that has ended{stopped}"
    if role is Role.RANK:
        return f"a rank whose torchrun has ended{stopped}"
    if role is Role.WORKER:
        return f"a worker of a run whose fork server has ended{stopped}"
    if role is Role.FORK_SERVER:
        return f"a fork server whose launcher has ended{stopped}"
    if process.ports or not (stopped or is_idle(process, for_s)):
        return ""
    if process.dead_pipes:
        return f"forked from a process that has ended, at the other end of its pipe{stopped}"
    if not _may_be_daemon(process, snapshot):
        return f"forked from a process that has ended{stopped}"
    return ""


def _may_be_daemon(process: Process, snapshot: ProcessSnapshot) -> bool:
    """Whether a process may be a daemon, whose session has lost its leader and has no groups."""
    leader = snapshot.by_pid.get(process.session)
    is_led = leader is not None and leader.pid != process.pid
    return not is_led and process.group == process.session


def is_idle(process: Process, for_s: float) -> bool:
    """Whether it used no processor time between two readings; False if it was read only once."""
    return process.used_s is not None and for_s > 0 and process.used_s < IDLE_SHARE * for_s


def _condition(
    process: Process, role: Role, is_ghost: bool, snapshot: ProcessSnapshot, for_s: float
) -> Condition:
    if is_ghost:
        return Condition.GHOST
    if process.state in "Tt":
        return Condition.STOPPED
    if role is Role.FORKED and has_lost_parent(process, snapshot):
        return Condition.DETACHED
    return Condition.IDLE if is_idle(process, for_s) else Condition.AT_WORK


def _leader(process: Process, snapshot: ProcessSnapshot) -> int:
    """Return the topmost ancestor that is reached through parts only."""
    leader, seen = process, {process.pid}
    while role_of(leader) in PARTS and not has_lost_parent(leader, snapshot):
        parent = snapshot.by_pid[leader.parent]
        if parent.pid in seen or role_of(parent) is Role.OTHER:
            break
        seen.add(parent.pid)
        leader = parent
    return leader.pid


def foreign(process: Process, snapshot: ProcessSnapshot) -> str:
    """Return why a process is out of reach; empty if it is this user's in the same namespace."""
    if process.owner != snapshot.owner:
        return "it is another user's"
    if process.state in "ZX":
        return "it has ended, but its parent has not waited for it yet"
    if not process.namespace:
        return "it may not be read"
    if process.namespace != snapshot.namespace:
        return "it is in another PID namespace: a container's; end it there"
    return ""


def ourselves(snapshot: ProcessSnapshot) -> set[int]:
    """Return the numbers of the process that reads and of all its ancestors."""
    pids: set[int] = set()
    pid = snapshot.own
    while pid not in pids and pid in snapshot.by_pid:
        pids.add(pid)
        pid = snapshot.by_pid[pid].parent
    return pids
