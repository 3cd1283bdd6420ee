"""The output of ``paceline ps`` and ``paceline clean``, as lines and as JSON fields.

Each work is listed with its leader first and its parts below. This module must not know how
processes are judged.
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
"""The most letters of a command that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The answer of ``ps``.

    Attributes:
        judged: the training processes.
        busy: devices that are busy without a known process.
        device_bytes: memory on devices by process, for those that the driver knows.
        unread: the number of this user's processes that may not be read in full.
    """

    judged: tuple[Judged, ...]
    busy: tuple[Busy, ...] = ()
    device_bytes: dict[int, int] = field(default_factory=dict)
    unread: int = 0

    @property
    def num_ghosts(self) -> int:
        """The number of processes that were left behind."""
        return sum(process.condition is Condition.GHOST for process in self.judged)

    def to_json(self) -> dict[str, object]:
        """Return the fields of the JSON output (docs/json.md)."""
        return {
            "processes": [
                {**_fields(judged), "device_bytes": self.device_bytes.get(judged.process.pid)}
                for judged in self.judged
            ],
            "ghosts": self.num_ghosts,
            "busy_devices": [
                {"device": device.device, "used_bytes": device.used_bytes,
                 "utilization": device.utilization, "reason": device.reason}
                for device in self.busy
            ],
            "unread": self.unread,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """The answer of ``clean``.

    Attributes:
        ends: what was chosen.
        has_acted: whether processes were ended; otherwise this is what would be done.
        ended: what became of each target.
        leftovers: files in shared memory that were freed, or would be.
        kept_ports: the targets' ports that are still taken.
    """

    ends: Ends
    has_acted: bool
    ended: tuple[ProcessEnd, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    kept_ports: tuple[int, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether all targets are gone, and no named process was refused."""
        return all(end.is_over for end in self.ended) and not self.ends.refused

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports at which the targets listen, or listened."""
        return tuple(sorted({port for process, _ in self.ends.targets for port in process.ports}))

    def to_json(self) -> dict[str, object]:
        """Return the fields of the JSON output (docs/json.md)."""
        end_of = {end.pid: end for end in self.ended}
        return {
            "has_acted": self.has_acted,
            "targets": [
                {
                    "pid": process.pid, "command": list(process.command), "reason": reason,
                    "memory_bytes": process.memory_bytes, "devices": list(process.devices),
                    "ended_by": (end_of[process.pid].by or None) if process.pid in end_of else None,
                    "is_over": end_of[process.pid].is_over if process.pid in end_of else None,
                }
                for process, reason in self.ends.targets
            ],
            "refused": [
                {"pid": refusal.pid, "reason": refusal.reason} for refusal in self.ends.refused
            ],
            "shared_memory": [
                {"path": leftover.path, "num_bytes": leftover.num_bytes}
                for leftover in self.leftovers
            ],
            "ports": list(self.ports),
            "kept_ports": list(self.kept_ports),
        }  # fmt: skip


def _fields(judged: Judged) -> dict[str, Any]:
    process = judged.process
    return {
        "pid": process.pid, "start_ticks": process.start_ticks, "command": list(process.command),
        "role": judged.role.value, "condition": judged.condition.value,
        "reason": judged.reason or None, "work": judged.leader,
        "parent": process.parent, "is_parent_alive": judged.is_parent_alive,
        "age_s": round(process.age_s, 2), "cpu_s": process.cpu_s,
        "memory_bytes": process.memory_bytes, "shared_bytes": process.shared_bytes,
        "shared": list(process.shared), "devices": list(process.devices),
        "ports": list(process.ports),
    }  # fmt: skip


def render_listed(listed: Listing) -> list[str]:
    """Return the lines that ``ps`` prints."""
    lines = []
    if listed.judged:
        rows = [_row(judged, listed.device_bytes) for judged in _by_work(listed.judged)]
        lines += [row.rstrip() for row in _aligned([_COLUMNS, *rows])]
        for judged in _by_work(listed.judged):
            if judged.role in (Role.SCRIPT, Role.LAUNCHER, Role.NOTEBOOK) or judged.reason:
                lines.append(f"  {judged.process.pid}: {_command(judged.process.command)}")
            if judged.reason:
                lines.append(f"    ghost: {judged.reason}")
            elif judged.condition is Condition.DETACHED:
                lines.append(
                    "    its parent has ended, but it may be a daemon on purpose; "
                    f"`paceline clean {judged.process.pid}` ends it"
                )
    else:
        lines.append("no training process of yours")
    lines += [f"{device.device}: {device.reason}" for device in listed.busy]
    if listed.unread:
        lines.append(f"{listed.unread} of your processes cannot be read, and are not judged")
    if listed.num_ghosts:
        held = sum(_own_bytes(judged) for judged in listed.judged if judged.reason)
        lines.append(
            f"{_count(listed.num_ghosts, 'ghost')} with {format_bytes(held)}; "
            "`paceline clean` shows what would be ended"
        )
    return lines


def _by_work(processes: Sequence[Judged]) -> list[Judged]:
    """Sort processes by work, each leader before its parts."""
    return sorted(
        processes, key=lambda judged: (judged.leader, judged.process.pid != judged.leader)
    )


def _row(judged: Judged, device_bytes: dict[int, int]) -> tuple[str, ...]:
    process = judged.process
    indent = "" if process.pid == judged.leader else "  "
    devices = [name.removeprefix("/dev/") for name in process.devices]
    used_bytes = device_bytes.get(process.pid)
    on_devices = "" if used_bytes is None else f" {format_bytes(used_bytes)}"
    return (
        f"{indent}{process.pid}", judged.role.value, judged.condition.value, _age(process.age_s),
        format_bytes(process.memory_bytes), format_bytes(process.shared_bytes),
        _few(devices) + on_devices, _few([str(port) for port in process.ports]),
        str(process.parent) if judged.is_parent_alive else "gone",
    )  # fmt: skip


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]


def _own_bytes(judged: Judged) -> int:
    return judged.process.memory_bytes - judged.process.shared_bytes


def _few(names: Sequence[str]) -> str:
    """Join the first few names, and say how many more there are."""
    more = f" and {len(names) - _MOST_NAMES}" if len(names) > _MOST_NAMES else ""
    return (",".join(names[:_MOST_NAMES]) or "-") + more


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _command(words: Iterable[str]) -> str:
    text = "".join(letter if letter.isprintable() else " " for letter in " ".join(words))
    return text if len(text) <= _MOST_COMMAND else f"{text[: _MOST_COMMAND - 3]}..."


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def render_cleaned(cleaned: Cleaned) -> list[str]:
    """Return the lines that ``clean`` prints."""
    targets = cleaned.ends.targets
    end_of = {end.pid: end for end in cleaned.ended}
    lines = []
    for process, reason in targets:
        end = end_of.get(process.pid)
        verb = "would end" if end is None else "ended" if end.is_over else "could not end"
        signal = f" by {end.by}" if end is not None and end.by else ""
        explanation = f" ({end.reason})" if end is not None and end.reason else ""
        lines += [
            f"{verb} {process.pid}{signal}{explanation}: {reason}",
            f"    {_command(process.command)}, {_age(process.age_s)} old, "
            f"{format_bytes(process.memory_bytes)}",
        ]
    lines += [f"left alone {refusal.pid}: {refusal.reason}" for refusal in cleaned.ends.refused]
    verb = "freed" if cleaned.has_acted else "would free"
    lines += [
        f"{verb} {leftover.path}, {format_bytes(leftover.num_bytes)}"
        for leftover in cleaned.leftovers
    ]
    if cleaned.ports:
        free = [str(port) for port in cleaned.ports if port not in cleaned.kept_ports]
        lines += [f"{verb} port {', '.join(free)}"] if free else []
        lines += [f"port {port} is still taken" for port in cleaned.kept_ports]
    if not targets and not cleaned.ends.refused:
        lines.append("no ghosts: nothing to end")
    if not cleaned.has_acted and (targets or cleaned.leftovers):
        lines.append("nothing was ended or removed; --yes does it")
    return lines
