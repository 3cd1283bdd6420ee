"""Chooses which processes `clean` may end (ghosts, or named ones with their parts), and why not.

This module is pure; it must not know how something is ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .judgement import PARTS, Role, foreign, ghosts, has_lost_parent, ourselves, role_of
from .snapshot import Process, ProcessKey, ProcessSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A process that is left alone, and why."""

    pid: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The processes that `clean` is about to end, and the named ones that it will not.

    Attributes:
        targets: each with the reason for ending it.
    """

    targets: tuple[tuple[Process, str], ...]
    refused: tuple[Refusal, ...] = ()


def choose(snapshot: ProcessSnapshot, named: tuple[int, ...] = (), for_s: float = 0.0) -> Ends:
    """Choose all ghosts; or, if processes are named, these and their parts and nothing else."""
    reasons = ghosts(snapshot, for_s)
    chosen: dict[ProcessKey, str] = {} if named else dict(reasons)
    refused = []
    for pid in named:
        process = snapshot.by_pid.get(pid)
        if process is None:
            refused.append(Refusal(pid=pid, reason="there is no such process"))
        elif reason := _why_not(process, snapshot):
            refused.append(Refusal(pid=pid, reason=reason))
        elif role_of(process) is Role.OTHER:
            refused.append(Refusal(pid=pid, reason="it does not train; use kill"))
        else:
            chosen[process.key] = reasons.get(process.key, "named")
            chosen |= {
                key: reason for key, reason in _parts_of(process, snapshot) if key not in chosen
            }
    processes = [(snapshot.by_pid[key[0]], reason) for key, reason in chosen.items()]
    targets = tuple(
        (process, reason) for process, reason in processes if not _why_not(process, snapshot)
    )
    return Ends(targets=targets, refused=tuple(refused))


def _parts_of(process: Process, snapshot: ProcessSnapshot) -> Iterator[tuple[ProcessKey, str]]:
    """Yield a process's parts, their parts, and so on, each with the reason for ending it.

    Parts of torchrun are its ranks, and parts of Paceline's launcher its fork server.
    """
    pending, seen = [process], {process.pid}
    while pending:
        parent = pending.pop()
        for child in snapshot.processes:
            is_child = child.parent == parent.pid and child.pid not in seen
            if is_child and role_of(child) in PARTS and not has_lost_parent(child, snapshot):
                seen.add(child.pid)
                pending.append(child)
                yield child.key, f"a {role_of(child).value} of {parent.pid}"


def _why_not(process: Process, snapshot: ProcessSnapshot) -> str:
    """Return why a process must not be ended; empty if it may."""
    if process.pid in ourselves(snapshot):
        return "this command runs in it"
    return foreign(process, snapshot)
