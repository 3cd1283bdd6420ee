"""What ``paceline ps`` and ``paceline clean`` print, and their fields as JSON.

Work by work: who leads it first, its parts below. This module must not know how one is judged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan import format_bytes
from .devices import Busy
from .ending import Leftover, ProcessEnd
from .judgement import Condition, Judged, Role
from .targets import Ends

_COLUMNS = ("PID", "what", "does", "since", "memory", "shared", "devices", "ports", "parent")
_MOST_NAMES = 3
_MOST_COMMAND = 70
"""Letters of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The answer of ``ps``.

    Attributes:
        device_bytes: process -> its memory on devices, of those that the driver knows.
        unread: processes of this user of which not all may be read.
    """

    judged: tuple[Judged, ...]
    busy: tuple[Busy, ...] = ()
    device_bytes: dict[int, int] = field(default_factory=dict)
    unread: int = 0

    @property
    def num_ghosts(self) -> int:
        """Processes that were left behind."""
        return sum(one.condition is Condition.GHOST for one in self.judged)

    def to_json(self) -> dict[str, object]:
        """Its fields (docs/json.md)."""
        return {
            "processes": [
                {**_fields(one), "device_bytes": self.device_bytes.get(one.process.pid)}
                for one in self.judged
            ],
            "ghosts": self.num_ghosts,
            "busy_devices": [
                {"device": one.device, "used_bytes": one.used_bytes,
                 "utilization": one.utilization, "reason": one.reason}
                for one in self.busy
            ],
            "unread": self.unread,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """The answer of ``clean``.

    Attributes:
        has_acted: whether it was asked to; else this is what it would do.
        leftovers: files in shared memory that were freed, or would be.
        ports: at which targets listen, or listened.
        kept_ports: of these, who are still taken.
    """

    ends: Ends
    has_acted: bool
    ended: tuple[ProcessEnd, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    kept_ports: tuple[int, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether all that was to be ended is gone, and nothing that was named was refused."""
        return all(one.is_over for one in self.ended) and not self.ends.refused

    @property
    def ports(self) -> tuple[int, ...]:
        """At which the targets listen, or listened."""
        return tuple(sorted({port for one, _ in self.ends.targets for port in one.ports}))

    def to_json(self) -> dict[str, object]:
        """Its fields (docs/json.md)."""
        became = {one.pid: one for one in self.ended}
        return {
            "has_acted": self.has_acted,
            "targets": [
                {
                    "pid": one.pid, "command": list(one.command), "reason": reason,
                    "memory_bytes": one.memory_bytes, "devices": list(one.devices),
                    "ended_by": (became[one.pid].by or None) if one.pid in became else None,
                    "is_over": became[one.pid].is_over if one.pid in became else None,
                }
                for one, reason in self.ends.targets
            ],
            "refused": [{"pid": one.pid, "reason": one.reason} for one in self.ends.refused],
            "shared_memory": [
                {"path": one.path, "num_bytes": one.num_bytes} for one in self.leftovers
            ],
            "ports": list(self.ports),
            "kept_ports": list(self.kept_ports),
        }  # fmt: skip


def _fields(one: Judged) -> dict[str, Any]:
    process = one.process
    return {
        "pid": process.pid, "start_ticks": process.start_ticks, "command": list(process.command),
        "role": one.role.value, "condition": one.condition.value, "reason": one.reason or None,
        "work": one.leader, "parent": process.parent, "is_parent_alive": one.is_parent_alive,
        "age_s": round(process.age_s, 2), "cpu_s": process.cpu_s,
        "memory_bytes": process.memory_bytes, "shared_bytes": process.shared_bytes,
        "shared": list(process.shared), "devices": list(process.devices),
        "ports": list(process.ports),
    }  # fmt: skip


def render_listed(listed: Listing) -> list[str]:
    """``ps``, in lines."""
    lines = []
    if listed.judged:
        rows = [_row(one, listed.device_bytes) for one in _by_work(listed.judged)]
        lines += [row.rstrip() for row in _aligned([_COLUMNS, *rows])]
        for one in _by_work(listed.judged):
            if one.role in (Role.SCRIPT, Role.LAUNCHER, Role.NOTEBOOK) or one.reason:
                lines.append(f"  {one.process.pid}: {_command(one.process.command)}")
            if one.reason:
                lines.append(f"    ghost: {one.reason}")
            elif one.condition is Condition.DETACHED:
                lines.append(
                    "    its parent has ended, and it may be a daemon that means it; "
                    f"`paceline clean {one.process.pid}` ends it"
                )
    else:
        lines.append("no training process of yours")
    lines += [f"{one.device}: {one.reason}" for one in listed.busy]
    if listed.unread:
        lines.append(f"{listed.unread} processes of yours may not be read, and are not judged")
    if listed.num_ghosts:
        held = sum(_own_bytes(one) for one in listed.judged if one.reason)
        lines.append(
            f"{_count(listed.num_ghosts, 'ghost')} with {format_bytes(held)}; "
            "`paceline clean` shows what would be ended"
        )
    return lines


def _by_work(judged: Sequence[Judged]) -> list[Judged]:
    """Who leads a work, and its parts behind it."""
    return sorted(judged, key=lambda one: (one.leader, one.process.pid != one.leader))


def _row(one: Judged, device_bytes: dict[int, int]) -> tuple[str, ...]:
    process = one.process
    indent = "" if process.pid == one.leader else "  "
    devices = [name.removeprefix("/dev/") for name in process.devices]
    used_bytes = device_bytes.get(process.pid)
    held = "" if used_bytes is None else f" {format_bytes(used_bytes)}"
    return (
        f"{indent}{process.pid}", one.role.value, one.condition.value, _age(process.age_s),
        format_bytes(process.memory_bytes), format_bytes(process.shared_bytes),
        _few(devices) + held, _few([str(port) for port in process.ports]),
        str(process.parent) if one.is_parent_alive else "gone",
    )  # fmt: skip


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]


def _own_bytes(one: Judged) -> int:
    return one.process.memory_bytes - one.process.shared_bytes


def _few(names: Sequence[str]) -> str:
    """Some of them, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES}" if len(names) > _MOST_NAMES else ""
    return (",".join(names[:_MOST_NAMES]) or "-") + more


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _command(words: Iterable[str]) -> str:
    text = "".join(one if one.isprintable() else " " for one in " ".join(words))
    return text if len(text) <= _MOST_COMMAND else f"{text[: _MOST_COMMAND - 3]}..."


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def render_cleaned(cleaned: Cleaned) -> list[str]:
    """``clean``, in lines."""
    targets = cleaned.ends.targets
    became = {one.pid: one for one in cleaned.ended}
    lines = []
    for process, reason in targets:
        one = became.get(process.pid)
        verb = "would end" if one is None else "ended" if one.is_over else "could not end"
        how = f" by {one.by}" if one is not None and one.by else ""
        more = f" ({one.reason})" if one is not None and one.reason else ""
        lines += [
            f"{verb} {process.pid}{how}{more}: {reason}",
            f"    {_command(process.command)}, {_age(process.age_s)} old, "
            f"{format_bytes(process.memory_bytes)}",
        ]
    lines += [f"left alone {one.pid}: {one.reason}" for one in cleaned.ends.refused]
    verb = "freed" if cleaned.has_acted else "would free"
    lines += [f"{verb} {one.path}, {format_bytes(one.num_bytes)}" for one in cleaned.leftovers]
    if cleaned.ports:
        free = [str(port) for port in cleaned.ports if port not in cleaned.kept_ports]
        lines += [f"{verb} port {', '.join(free)}"] if free else []
        lines += [f"port {port} is still taken" for port in cleaned.kept_ports]
    if not targets and not cleaned.ends.refused:
        lines.append("no ghosts: nothing to end")
    if not cleaned.has_acted and (targets or cleaned.leftovers):
        lines.append("nothing was touched; --yes does it")
    return lines
