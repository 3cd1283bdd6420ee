"""What trains, whose work it is, why it is a ghost, and what may be ended: decisions on data.

    ProcessSnapshot ---> role of each ---> has it lost whom it needs? ---> why it is a ghost, or ""
                                                                         |
                                   `targets.py`: may it be ended, or why not

A part is what cannot be of use alone. Its real parent runs the same program (a process that is
forked has its parent's), so a parent that runs another one has adopted it; words of a command prove
nothing, since a program may write its own. A forked part may be a
daemon that has left its parent on purpose; it is told from one by what daemons have: a session
without its leader and without groups, a port, work, and no pipe to somebody who is dead. This
module is pure; it must not know how processes are read or ended.
"""

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .snapshot import Process, ProcessKey, ProcessSnapshot

IDLE_SHARE = 0.01
"""Of one core: less than this in a look is nothing; a Python that only waits uses less."""
_INIT = 1
_NOTEBOOKS = ("ipykernel", "colab_kernel_launcher", "jupyter", "marimo", "xpython")
_SPAWNED = "multiprocessing.spawn"
_COMPILER = "torch/_inductor/compile_worker"
_FORKED_FROM = "multiprocessing.forkserver"
_SERVER = "paceline.engines.local.forkserver"
_RANK_S = 1.0
"""torchrun begins its ranks within that; a rank has hardly imported torch by then."""
_LOADER = "pt_data_worker"
_COMMANDS = ("train", "launch", "compare", "bench", "tune", "plan", "partition", "verify")


class Role(enum.Enum):
    """What a process is for."""

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
    """What it does."""

    AT_WORK = "at work"
    IDLE = "idle"
    STOPPED = "stopped"
    DETACHED = "detached"
    GHOST = "ghost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One training process.

    Attributes:
        leader: of its work: the script, launcher or notebook that it is a part of; itself where it
            is none, or where that is gone.
        is_parent_alive: whether it still has the parent that began it, as far as it needs one.
        reason: why it is a ghost; empty: it is none.
    """

    process: Process
    role: Role
    condition: Condition
    leader: int
    is_parent_alive: bool
    reason: str = ""


def judge(snapshot: ProcessSnapshot, for_s: float = 0.0) -> list[Judged]:
    """Every training process of this user that is in sight and not the one that looks.

    Args:
        for_s: how long was looked: without it nobody is idle.
    """
    reasons = ghosts(snapshot, for_s)
    found = []
    for process in snapshot.processes:
        role = role_of(process)
        if role is Role.OTHER or process.pid in ourselves(snapshot) or foreign(process, snapshot):
            continue
        reason = reasons.get(process.key, "")
        found.append(
            Judged(
                process=process, role=role, leader=_leader(process, snapshot), reason=reason,
                condition=_condition(process, role, bool(reason), snapshot, for_s),
                is_parent_alive=not has_lost_parent(process, snapshot),
            )
        )  # fmt: skip
    return found


def role_of(process: Process) -> Role:
    """What a process is for, by its program, its name and what it has loaded."""
    words = " ".join(process.command)
    if not process.is_forked and _is_python(process) and _is_paceline(process.command):
        return Role.LAUNCHER
    if not (process.has_torch or _holds_as_python(process)):
        return Role.OTHER
    if process.is_forked and process.name == _LOADER:
        return Role.LOADER_WORKER
    if any(one.rpartition("/")[2].startswith(_NOTEBOOKS) for one in process.command):
        return Role.NOTEBOOK
    if process.is_forked:
        return Role.WORKER if _SERVER in words else Role.FORKED
    if _SERVER in words or _FORKED_FROM in words:
        return Role.FORK_SERVER
    if _SPAWNED in words or _COMPILER in words:
        return Role.LOADER_WORKER if process.name == _LOADER else Role.SPAWNED
    if process.name == "pt_elastic" or "torch.distributed.run" in words:
        return Role.LAUNCHER
    return Role.RANK if _is_rank(process) else Role.SCRIPT


def _is_rank(process: Process) -> bool:
    """Whether torchrun began it itself: a rank leads its session, and is as old as its folder.

    A program that a rank has begun has the rank's variables, and may have a session of its own. A
    rank's command is whatever was asked for (``-m``, ``--no-python``), so that it tells nothing.
    """
    began_s = process.rank_s
    return process.pid == process.session and began_s is not None and abs(began_s) < _RANK_S


def _is_paceline(command: tuple[str, ...]) -> bool:
    words = [one.rpartition("/")[2] for one in command]
    return any(a == "paceline" and b in _COMMANDS for a, b in itertools.pairwise(words))


def _holds_as_python(process: Process) -> bool:
    """An accelerator: screens and browsers hold one, too, and are no Python."""
    return bool(process.devices) and _is_python(process)


def _is_python(process: Process) -> bool:
    return "python" in process.exe.rpartition("/")[2]


_BELOW = (Role.WORKER, Role.LOADER_WORKER, Role.SPAWNED, Role.FORKED)
"""Parts that go with the process that began them."""
PARTS = (Role.FORK_SERVER, Role.RANK, *_BELOW)
"""What cannot be of use alone."""


def has_lost_parent(process: Process, snapshot: ProcessSnapshot) -> bool:
    """Whether a part was adopted by somebody who cannot have begun it."""
    role = role_of(process)
    if role not in PARTS:
        return False
    parent = snapshot.by_pid.get(process.parent)
    if parent is None or parent.start_ticks > process.start_ticks:
        return True
    if not parent.exe or not process.exe:  # another's, or closed to us: it may well be the one
        return parent.pid == _INIT
    if role is Role.LOADER_WORKER:  # its loader lives in a process that has torch, or forks it
        return not (parent.has_torch or _FORKED_FROM in " ".join(parent.command))
    if process.is_forked:  # so its parent's program was its own
        return parent.exe != process.exe
    return not (_is_python(parent) or parent.has_torch)


def ghosts(snapshot: ProcessSnapshot, for_s: float = 0.0) -> dict[ProcessKey, str]:
    """Why each ghost is one."""
    reasons = {
        process.key: reason
        for process in snapshot.processes
        if has_lost_parent(process, snapshot) and (reason := _why(process, snapshot, for_s))
    }
    while found := dict(_with_parent(snapshot, reasons)):
        reasons |= found
    return reasons


def _with_parent(
    snapshot: ProcessSnapshot, reasons: dict[ProcessKey, str]
) -> Iterator[tuple[ProcessKey, str]]:
    """Parts whose parent is a ghost, and that are not yet known to be one."""
    for process in snapshot.processes:
        parent = snapshot.by_pid.get(process.parent)
        if (
            parent is not None and parent.key in reasons and process.key not in reasons
            and role_of(process) in _BELOW and not has_lost_parent(process, snapshot)
        ):  # fmt: skip
            yield process.key, f"a {role_of(process).value} of {parent.pid}, which is a ghost"


def _why(process: Process, snapshot: ProcessSnapshot, for_s: float) -> str:
    """Why a part that has lost its parent is a ghost; empty: it may be meant so."""
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
    """A daemon begins a session, whose leader ends at once, and no group in it."""
    leader = snapshot.by_pid.get(process.session)
    is_led = leader is not None and leader.pid != process.pid
    return not is_led and process.group == process.session


def is_idle(process: Process, for_s: float) -> bool:
    """Whether it has used nothing while it was looked at; False where nobody has looked twice."""
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
    """The uppermost of its parents from which on all are parts or lead."""
    here, seen = process, {process.pid}
    while role_of(here) in PARTS and not has_lost_parent(here, snapshot):
        parent = snapshot.by_pid[here.parent]
        if parent.pid in seen or role_of(parent) is Role.OTHER:
            break
        seen.add(parent.pid)
        here = parent
    return here.pid


def foreign(process: Process, snapshot: ProcessSnapshot) -> str:
    """Why a process is out of reach; empty: it is this user's, and seen as itself."""
    if process.owner != snapshot.owner:
        return "it is another user's"
    if process.state in "ZX":
        return "it has ended, and its parent has not asked for it yet"
    if not process.namespace:
        return "it may not be looked at"
    if process.namespace != snapshot.namespace:
        return "it is in another PID namespace: a container's; end it there"
    return ""


def ourselves(snapshot: ProcessSnapshot) -> set[int]:
    """The process that looks, and all that it descends from."""
    found: set[int] = set()
    pid = snapshot.own
    while pid not in found and pid in snapshot.by_pid:
        found.add(pid)
        pid = snapshot.by_pid[pid].parent
    return found
