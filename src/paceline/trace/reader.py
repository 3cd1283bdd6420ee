"""Reads a trace; an error names the damaged line.

    bytes of a line -> its checksum (records.py) -> JSON -> fields, type-checked -> a record

This module must not know engines or reports.
"""

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from ..config import MOST_WORKERS
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
    Retire,
    Stalled,
    Ticket,
)
from ..fields import boolean, by_name, count, integer, many, number, real, refuse_constant, text
from ..run_dir import TRIALS
from ..system.files import open_to_read
from .records import (
    LONGEST_BYTES,
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
    Scalar,
    Scaled,
    StopRecord,
    StreamEnded,
    Struck,
    SupersededRecord,
    lines_of,
    opened,
)

FORMAT = 3
"""Grows when an older reader could misread a newer line. 2: each line ends with a checksum. 3: a
push may keep leases, or leave them unused."""


def has_begun(path: Path) -> bool:
    """Return whether a member joined this trace's run; False if there is no trace."""
    try:
        records = read_trace(path)
        return any(
            isinstance(record, Heard) and isinstance(record.fact, Joined) for record in records
        )
    except ConfigError:
        return path.is_file() and path.stat().st_size > 0  # damaged: it may have begun


def refuse_other_format(path: Path) -> None:
    """Raise ConfigError if a trace, even a damaged one, has another format."""
    with suppress(OSError, ValueError, RecursionError), open_to_read(path) as file:
        _check_format(file.readline(LONGEST_BYTES))


def read_header(path: Path) -> Header:
    """Return the first line of a trace; raise ConfigError if it is empty or damaged."""
    header = next(read_trace(path), None)
    if not isinstance(header, Header):
        raise ConfigError(f"{path} is empty: no run began here")
    return header


def read_trace(path: Path) -> Iterator[Record]:
    """Yield the records of a trace, in order.

    A truncated last line, as after a power failure, is left out.

    Raises:
        ConfigError: the file is missing, has another format, or is damaged anywhere else; the
            line is named.
    """
    try:
        file = open_to_read(path)
    except OSError as error:
        reason = f"{error.strerror}{_hint(error, path)}"
        raise ConfigError(f"the trace {path} cannot be read: {reason}") from None
    total = 0
    with file:
        for number, line in enumerate(lines_of(file), start=1):
            if not line.endswith(b"\n") and len(line) < LONGEST_BYTES:
                return
            record, total = record_of(path, number, line, total)
            yield record


def record_of(path: Path, number: int, line: bytes, before: int) -> tuple[Record, int]:
    """Return the record of a complete line, and the checksum of all lines up to it.

    Args:
        number: of the line, from 1.
        before: the checksum of the lines before.

    Raises:
        ConfigError: it is damaged, or has another format.
    """
    try:
        if number == 1:
            _check_format(line)
        body, total = opened(line, before)
        record = _record(body + b"}")
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        advice = f"; the lines before it can be read from a copy: head -n {number - 1}"
        raise ConfigError(
            f"the trace is damaged at {path}:{number} ({type(error).__name__}: {error})"
            f"{advice if number > 1 else ', its first line: nothing of it can be read'}"
        ) from None
    if number == 1 and not isinstance(record, Header):
        raise ConfigError(f"{path} is not a trace: its first line is not a header")
    return record, total


def _hint(error: OSError, path: Path) -> str:
    """Return a hint if a trace is missing because a script made trials there, with one each."""
    if error.errno != errno.ENOENT or not (path.parent / TRIALS).is_file():
        return ""
    return f"; {path.parent} holds the trials of a script: give the folder of one of them"


def contradiction(what: str) -> ConfigError:
    """Return the error for lines that are valid one by one but contradict each other."""
    return ConfigError(f"the trace contradicts itself: {what}")


_Fields: TypeAlias = dict[str, Any]


def _check_format(line: bytes) -> None:
    """Raise ConfigError if the first line says that the trace has another format."""
    fields = json.loads(line)
    version = fields.get("format", FORMAT) if isinstance(fields, dict) else FORMAT
    if type(version) is int and version != FORMAT:
        remedy = (
            "update paceline" if version > FORMAT else "read it with the paceline that wrote it"
        )
        raise ConfigError(f"the trace has format {version}, this paceline reads {FORMAT}: {remedy}")


def _record(line: bytes) -> Record:
    """Return the record of one line; raise ValueError, KeyError or TypeError if it is invalid."""
    fields = json.loads(line, parse_constant=refuse_constant)
    return _READERS[text(fields["kind"])](fields)


def _ticket(value: Any) -> Ticket:
    member, serial, version = map(integer, many(integer)(value))
    return Ticket(count(member), serial, version)


def _lease(value: Any) -> Lease:
    lease = Lease(*many(count)(value))
    if not lease.start < lease.stop:
        raise ValueError(f"a lease from {lease.start} to {lease.stop}")
    return lease


def _total(value: Any) -> tuple[float, float]:
    total, num_samples = many(number)(value)
    return total, num_samples


def _scalar(value: Any) -> Scalar:
    if value is None or isinstance(value, str | bool):
        return value
    return integer(value) if type(value) is int else real(value)


def _scalars(value: Any) -> Scalar | list[Scalar]:
    return [*map(_scalar, value)] if type(value) is list else _scalar(value)


# -- records --------------------------------------------------------------------------------------


def _header(fields: _Fields) -> Header:
    integer(fields["format"])
    if not 0 < count(fields.get("workers", 1)) <= MOST_WORKERS:
        raise ValueError(f"{fields['workers']} workers")
    return Header(fields={name: _scalars(fields[name]) for name in fields if name != "kind"})


def _pushed(fields: _Fields) -> Handed:
    fact = Pushed(
        _ticket(fields["ticket"]),
        count(fields["samples"]),
        number(fields["loss"]),
        boolean(fields["finite"]),
        real(fields["t"]),
        real(fields["weight"]) if "weight" in fields else None,
        many(count)(fields.get("kept", [])),
        many(count)(fields.get("unused", [])),
    )
    return Handed(
        fact=fact, compute_s=real(fields["compute"]), wait_s=real(fields["wait"]),
        push_s=real(fields["push"]), add_s=real(fields.get("add", 0.0)),
        input_s=real(fields.get("input", 0.0)),
    )  # fmt: skip


def _joined(fields: _Fields) -> Heard:
    fact = Joined(count(fields["member"]), real(fields["t"]))
    return Heard(fact=fact, worker=integer(fields["worker"]), pid=integer(fields["pid"]))


def _apply(fields: _Fields) -> Apply:
    update = Apply(many(_ticket)(fields["tickets"]), many(real)(fields["weights"]))
    if len(update.tickets) != len(update.weights):
        raise ValueError(f"{len(update.tickets)} tickets and {len(update.weights)} weights")
    return update


def _grant(fields: _Fields) -> Grant:
    leases, upcoming = (many(_lease)(fields[name]) for name in ("leases", "upcoming"))
    return Grant(_ticket(fields["ticket"]), leases, upcoming)


def _ordered(make: Callable[[_Fields], Order]) -> Callable[[_Fields], Ordered]:
    return lambda fields: Ordered(t_s=real(fields["t"]), order=make(fields))


def _superseded(fields: _Fields) -> SupersededRecord:
    return SupersededRecord(
        t_s=real(fields["t"]),
        ticket=Ticket(count(fields["member"]), integer(fields["serial"]), -1),
        wasted_s=real(fields["wasted"]),
        saved_s=real(fields["saved"]),
    )


def _evaluated(fields: _Fields) -> Evaluated:
    return Evaluated(
        t_s=real(fields["t"]), epoch=integer(fields["epoch"]), version=count(fields["version"]),
        totals=by_name(_total)(fields["totals"]),
    )  # fmt: skip


_READERS: Mapping[str, Callable[[_Fields], Record]] = {
    "run": _header,
    "joined": _joined,
    "left": lambda f: Heard(
        fact=Left(count(f["member"]), real(f["t"])), reason=text(f["reason"])
    ),
    "stalled": lambda f: Heard(fact=Stalled(count(f["member"]), real(f["t"]))),
    "pushed": _pushed,
    "apply": _ordered(_apply),
    "grant": _ordered(_grant),
    "discard": _ordered(lambda f: Discard(_ticket(f["ticket"]))),
    "late": _ordered(lambda f: Late(_ticket(f["ticket"]))),
    "cancel": _ordered(lambda f: Cancel(count(f["member"]))),
    "retire": _ordered(lambda f: Retire(many(_ticket)(f["tickets"]))),
    "epoch_end": _ordered(
        lambda f: EpochEnd(count(f["epoch"]), count(f["version"]), count(f.get("unused", 0)))
    ),
    "superseded": _superseded,
    "scaled": lambda f: Scaled(
        t_s=real(f["t"]), ticket=_ticket(f["ticket"]), scale=real(f["scale"])
    ),
    "evaluated": _evaluated,
    "log": lambda f: Logged(
        t_s=real(f["t"]), member=count(f["member"]), values=by_name(number)(f["values"])
    ),
    "fault": lambda f: Struck(t_s=real(f["t"]), text=text(f["text"])),
    "resumed": lambda f: Resumed(
        t_s=real(f["t"]), version=count(f["version"]), workers=count(f["workers"]),
        lost=count(f["lost"]), changes=by_name(_scalars)(f["changes"]),
    ),
    "note": lambda f: Noted(t_s=real(f["t"]), text=text(f["text"])),
    "rerouted": lambda f: Rerouted(t_s=real(f["t"]), path=text(f["path"])),
    "stream_ended": lambda f: StreamEnded(
        t_s=real(f["t"]), epoch=count(f["epoch"]), end=count(f["end"])
    ),
    "stopped": lambda f: StopRecord(t_s=real(f["t"])),
    "end": lambda f: Ended(t_s=real(f["t"]), reason=text(f["reason"])),
}  # fmt: skip
