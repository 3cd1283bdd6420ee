"""The trace of a run: an append-only file of what was heard, ordered and measured, line by line.

One JSON object a line, ``"kind"`` first; ``"t"`` is in seconds since the run's start. Everything
that a report says is computed from this file alone, so a run can be looked at again, and the
order of its lines *is* the run, so it can be replayed. This module must not know engines or
reports.

    {"kind": "run", "format": 1, "task": "lenet", ...}
    {"kind": "joined", "t": 0.81, "member": 0, "worker": 0, "pid": 4711}
    {"kind": "grant", "t": 0.82, "ticket": [0, 0, 0], "leases": [[0, 0, 0, 128]], "upcoming": []}
    {"kind": "pushed", "t": 0.84, "ticket": [0, 0, 0], "samples": 128, "loss": 2.3, ...}
    {"kind": "resumed", "t": 9.1, "version": 412, "workers": 2, "lost": 17, "changes": {}}
    {"kind": "apply", "t": 0.84, "tickets": [[0, 0, 0], [1, 0, 0]], "weights": [0.5, 0.5]}

A push costs a few microseconds here: lines are formatted by hand and written through a buffer,
which the engine flushes a few times a second.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from .errors import ConfigError
from .events import (
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
from .records import (
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
    Stopped,
    Struck,
    Superseded,
)

FORMAT = 1
"""Grows when a reader of today could misread a line of tomorrow."""
FILE_NAME = "trace.jsonl"
_BUFFER_BYTES = 1 << 16


class Trace:
    """Writes the trace of one run.

    Args:
        goes_on: the file is an earlier part of the run; it is not changed before ``go_on``.

    Invariant: after ``close`` every line that was written is whole and on disk, and nothing stands
    after the end (``tests/test_trace.py``).

    Attributes:
        has_begun: whether a member joined: the plan was accepted.
    """

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        self.path = path
        # Line endings are fixed, so that two runs of the same log are equal byte for byte.
        mode = "r+" if goes_on else "w"
        self._file = path.open(mode, encoding="utf-8", newline="\n", buffering=_BUFFER_BYTES)
        self._write = self._file.write
        self._has_ended = False
        self.has_begun = False

    def header(self, **fields: Scalar | list[Scalar]) -> None:
        """The first line: what kind of run it is."""
        self._line({"kind": "run", "format": FORMAT, **fields})

    def mark(self) -> int:
        """The length in bytes of what was written: where a checkpoint of now stands in it."""
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size

    def go_on(
        self,
        at_bytes: int,
        t: float,
        version: int,
        workers: int,
        header: Mapping[str, Scalar | list[Scalar]],
    ) -> int:
        """Cut off what came after a checkpoint and go on from there; how many updates were cut.

        Args:
            header: what the first line of a new run would say; what differs is written down.
        """
        was = read_header(self.path).fields
        changes = {name: now for name, now in header.items() if was.get(name) != now}
        with self.path.open("rb") as file:
            file.seek(at_bytes)
            lost = sum(line.startswith(b'{"kind":"apply"') for line in file)
        self._file.truncate(at_bytes)
        self._file.seek(at_bytes)
        self._line(
            {"kind": "resumed", "t": t, "version": version, "workers": workers, "lost": lost,
             "changes": changes}
        )  # fmt: skip
        return lost

    def joined(self, t: float, member: int, worker: int, pid: int) -> None:
        self.has_begun = True
        self._line({"kind": "joined", "t": t, "member": member, "worker": worker, "pid": pid})

    def left(self, t: float, member: int, reason: str) -> None:
        self._line({"kind": "left", "t": t, "member": member, "reason": reason})

    def stalled(self, t: float, member: int) -> None:
        self._line({"kind": "stalled", "t": t, "member": member})

    def pushed(
        self, fact: Pushed, compute_s: float, wait_s: float, push_s: float, add_s: float = 0.0
    ) -> None:
        """A push, and where its member's seconds went since the push before."""
        (member, serial, version), num_samples, loss, is_finite, at_s = fact
        added = f',"add":{add_s:.6f}' if add_s else ""
        # JSON has no nan: a loss that is none is null. repr() gives the float back bit for bit.
        self._write(
            f'{{"kind":"pushed","t":{at_s!r},"ticket":[{member},{serial},{version}],'
            f'"samples":{num_samples},"loss":{loss if -math.inf < loss < math.inf else "null"},'
            f'"finite":{"true" if is_finite else "false"},"compute":{compute_s:.6f},'
            f'"wait":{wait_s:.6f},"push":{push_s:.6f}{added}}}\n'
        )

    def order(self, order: Order, t: float) -> None:
        """An order of the coordinator."""
        if isinstance(order, Grant):
            leases = f'"leases":{_lists(order.leases)},"upcoming":{_lists(order.upcoming)}'
            self._write(f'{{"kind":"grant","t":{t:.6f},"ticket":{[*order.ticket]},{leases}}}\n')
        elif isinstance(order, Apply):
            self._write(
                f'{{"kind":"apply","t":{t:.6f},"tickets":{_lists(order.tickets)},'
                f'"weights":{[*order.weights]}}}\n'
            )
        elif isinstance(order, Cancel):
            self._write(f'{{"kind":"cancel","t":{t:.6f},"member":{order.member}}}\n')
        elif isinstance(order, EpochEnd):
            self._write(
                f'{{"kind":"epoch_end","t":{t:.6f},"epoch":{order.epoch},'
                f'"version":{order.version}}}\n'
            )
        else:
            kind = "discard" if isinstance(order, Discard) else "late"
            self._write(f'{{"kind":"{kind}","t":{t:.6f},"ticket":{[*order.ticket]}}}\n')

    def superseded(
        self, t: float, member: int, serial: int, wasted_s: float, saved_s: float
    ) -> None:
        """Work that was abandoned: seconds thrown away, and those that abandoning it saved."""
        self._write(
            f'{{"kind":"superseded","t":{t:.6f},"member":{member},"serial":{serial},'
            f'"wasted":{wasted_s:.6f},"saved":{saved_s:.6f}}}\n'
        )

    def scaled(self, t: float, ticket: Ticket, scale: float) -> None:
        """What distance left of a push that is in an update, where the update was executed."""
        self._write(
            f'{{"kind":"scaled","t":{t:.6f},"ticket":{[*ticket]},"scale":{float(scale)!r}}}\n'
        )

    def evaluated(
        self, t: float, epoch: int, version: int, totals: Mapping[str, tuple[float, float]]
    ) -> None:
        """An evaluation at one version: per metric the sum over samples and their number."""
        rows = {name: [_finite(total), count] for name, (total, count) in totals.items()}
        self._line(
            {"kind": "evaluated", "t": t, "epoch": epoch, "version": version, "totals": rows}
        )

    def log(self, t: float, member: int, values: Mapping[str, float]) -> None:
        """Values that a member logged."""
        finite = {name: _finite(value) for name, value in values.items()}
        self._line({"kind": "log", "t": t, "member": member, "values": finite})

    def fault(self, t: float, text: str) -> None:
        """What was ordered to go wrong goes wrong now."""
        self._line({"kind": "fault", "t": t, "text": text})

    def note(self, t: float, text: str) -> None:
        self._line({"kind": "note", "t": t, "text": text})

    def rerouted(self, t: float, path: str) -> None:
        """From here on gradients go this way."""
        self._line({"kind": "rerouted", "t": t, "path": path})

    def stopped(self, t: float) -> None:
        """The run is told to stop."""
        self._line({"kind": "stopped", "t": t})

    def end(self, t: float, reason: str) -> None:
        """The last line; what is said of the end after that is not written."""
        if not self._has_ended:
            self._has_ended = True
            self._line({"kind": "end", "t": t, "reason": reason})
            self.flush()

    def flush(self) -> None:
        """Hand what was written to the operating system: it then survives this process."""
        self._file.flush()

    def close(self) -> None:
        """Write what is buffered and close; may be called twice."""
        self._file.close()

    def _line(self, fields: Mapping[str, object]) -> None:
        self._write(json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n")


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


def _lists(rows: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """Named tuples as lists, whose text is JSON."""
    return [[*row] for row in rows]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _header(fields: _Fields) -> Header:
    if fields["format"] > FORMAT:
        raise ValueError(f"format {fields['format']} is newer than {FORMAT}: update paceline")
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
