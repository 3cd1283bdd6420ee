"""Reading a trace: whatever is damaged is named, with its line.

This module must not know engines or reports.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError
from ..events import (
    Apply,
    Cancel,
    Discard,
    EpochEnd,
    Grant,
    Joined,
    Late,
    Lease,
    Left,
    Order,
    Pushed,
    Stalled,
    Ticket,
)
from ..records import (
    Ended,
    Evaluated,
    Handed,
    Header,
    Heard,
    Logged,
    Noted,
    Ordered,
    Record,
    Rerouted,
    Resumed,
    Scaled,
    Stopped,
    Struck,
    Superseded,
)

FORMAT = 1
"""Grows when a reader of today could misread a line of tomorrow."""


def has_begun(path: Path) -> bool:
    """Whether the run of this trace came to its first step's eve; False where there is no trace."""
    try:
        records = read_trace(path)
        return any(isinstance(one, Heard) and isinstance(one.fact, Joined) for one in records)
    except ConfigError:
        return False


def read_header(path: Path) -> Header:
    """The first line of a trace; an empty one is refused as a damaged one is."""
    header = next(read_trace(path), None)
    if not isinstance(header, Header):
        raise ConfigError(f"{path} is empty: no run began here")
    return header


def read_trace(path: Path) -> Iterator[Record]:
    """The records of a trace, in order.

    A last line that was cut off, as by a power failure, is left out. Raises ConfigError where the
    file is missing, is of a newer format, or is damaged anywhere else; it names the line.
    """
    try:
        file = path.open(encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from None
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                fields = json.loads(line)
                record = _READERS[fields["kind"]](fields)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ConfigError(
                    f"the trace is damaged at {path}:{number} ({type(error).__name__}: {error}); "
                    f"what stands before it can be read from a copy: head -n {number - 1}"
                ) from None
            if number == 1 and not isinstance(record, Header):
                raise ConfigError(f"{path} is no trace: its first line is {fields['kind']!r}")
            yield record


_Fields: TypeAlias = dict[str, Any]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _header(fields: _Fields) -> Header:
    if fields["format"] > FORMAT:
        raise ConfigError(
            f"the trace is of format {fields['format']}, newer than {FORMAT}: update paceline"
        )
    return Header(fields={name: value for name, value in fields.items() if name != "kind"})


def _pushed(fields: _Fields) -> Handed:
    fact = Pushed(
        Ticket(*fields["ticket"]),
        fields["samples"],
        _number(fields["loss"]),
        fields["finite"],
        fields["t"],
    )
    return Handed(
        fact=fact, compute_s=fields["compute"], wait_s=fields["wait"], push_s=fields["push"],
        add_s=fields.get("add", 0.0),
    )  # fmt: skip


def _joined(fields: _Fields) -> Heard:
    fact = Joined(fields["member"], fields["t"])
    return Heard(fact=fact, worker=fields["worker"], pid=fields["pid"])


def _apply(fields: _Fields) -> Apply:
    return Apply(tuple(Ticket(*one) for one in fields["tickets"]), tuple(fields["weights"]))


def _grant(fields: _Fields) -> Grant:
    leases, upcoming = (
        tuple(Lease(*one) for one in fields[name]) for name in ("leases", "upcoming")
    )
    return Grant(Ticket(*fields["ticket"]), leases, upcoming)


def _ordered(make: Callable[[_Fields], Order]) -> Callable[[_Fields], Ordered]:
    return lambda fields: Ordered(t_s=fields["t"], order=make(fields))


def _superseded(fields: _Fields) -> Superseded:
    return Superseded(
        t_s=fields["t"],
        ticket=Ticket(fields["member"], fields["serial"], -1),
        wasted_s=fields["wasted"],
        saved_s=fields["saved"],
    )


def _evaluated(fields: _Fields) -> Evaluated:
    totals = {name: (_number(row[0]), float(row[1])) for name, row in fields["totals"].items()}
    return Evaluated(
        t_s=fields["t"], epoch=fields["epoch"], version=fields["version"], totals=totals
    )


_READERS: Mapping[str, Callable[[_Fields], Record]] = {
    "run": _header,
    "joined": _joined,
    "left": lambda f: Heard(fact=Left(f["member"], f["t"]), reason=f["reason"]),
    "stalled": lambda f: Heard(fact=Stalled(f["member"], f["t"])),
    "pushed": _pushed,
    "apply": _ordered(_apply),
    "grant": _ordered(_grant),
    "discard": _ordered(lambda f: Discard(Ticket(*f["ticket"]))),
    "late": _ordered(lambda f: Late(Ticket(*f["ticket"]))),
    "cancel": _ordered(lambda f: Cancel(f["member"])),
    "epoch_end": _ordered(lambda f: EpochEnd(f["epoch"], f["version"])),
    "superseded": _superseded,
    "scaled": lambda f: Scaled(t_s=f["t"], ticket=Ticket(*f["ticket"]), scale=f["scale"]),
    "evaluated": _evaluated,
    "log": lambda f: Logged(
        t_s=f["t"],
        member=f["member"],
        values={name: _number(value) for name, value in f["values"].items()},
    ),
    "fault": lambda f: Struck(t_s=f["t"], text=f["text"]),
    "resumed": lambda f: Resumed(
        t_s=f["t"],
        version=f["version"],
        workers=f["workers"],
        lost=f["lost"],
        changes=f.get("changes", {}),  # format 1 had none at first
    ),
    "note": lambda f: Noted(t_s=f["t"], text=f["text"]),
    "rerouted": lambda f: Rerouted(t_s=f["t"], path=str(f["path"])),
    "stopped": lambda f: Stopped(t_s=f["t"]),
    "end": lambda f: Ended(t_s=f["t"], reason=f["reason"]),
}
