"""What `clean` may end: ghosts, or what is named with its parts; who is left alone, and why.

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
    """What `clean` is about to end, and what it will not though it was named.

    Attributes:
        targets: with the reason of each.
    """

    targets: tuple[tuple[Process, str], ...]
    refused: tuple[Refusal, ...] = ()


def choose(snapshot: ProcessSnapshot, named: tuple[int, ...] = (), for_s: float = 0.0) -> Ends:
    """All ghosts; where processes are named, these and their parts, and nothing else."""
    reasons = ghosts(snapshot, for_s)
    chosen: dict[ProcessKey, str] = {} if named else dict(reasons)
    refused = []
    for pid in named:
        process = snapshot.by_pid.get(pid)
        if process is None:
            refused.append(Refusal(pid=pid, reason="there is no such process"))
        elif why := _why_not(process, snapshot):
            refused.append(Refusal(pid=pid, reason=why))
        elif role_of(process) is Role.OTHER:
            refused.append(Refusal(pid=pid, reason="it does not train; use kill"))
        else:
            chosen[process.key] = reasons.get(process.key, "named")
            chosen |= {key: why for key, why in _parts_of(process, snapshot) if key not in chosen}
    found = [(snapshot.by_pid[key[0]], reason) for key, reason in chosen.items()]
    targets = tuple((one, reason) for one, reason in found if not _why_not(one, snapshot))
    return Ends(targets=targets, refused=tuple(refused))


def _parts_of(process: Process, snapshot: ProcessSnapshot) -> Iterator[tuple[ProcessKey, str]]:
    """Its parts, theirs, and so on; of torchrun its ranks, of Paceline its fork server."""
    ahead, seen = [process], {process.pid}
    while ahead:
        above = ahead.pop()
        for one in snapshot.processes:
            is_child = one.parent == above.pid and one.pid not in seen
            if is_child and role_of(one) in PARTS and not has_lost_parent(one, snapshot):
                seen.add(one.pid)
                ahead.append(one)
                yield one.key, f"a {role_of(one).value} of {above.pid}"


def _why_not(process: Process, snapshot: ProcessSnapshot) -> str:
    """Why a process must not be ended; empty: it may."""
    if process.pid in ourselves(snapshot):
        return "this command runs in it"
    return foreign(process, snapshot)
