"""Writing a trace: a push costs a few microseconds here.

Lines are formatted by hand and written through a buffer, which the engine flushes a few times a
second. This module must not know engines or reports.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

from ..events import (
    Apply,
    Cancel,
    Discard,
    EpochEnd,
    Grant,
    Order,
    Pushed,
    Retire,
    Ticket,
)
from ..records import (
    Scalar,
)
from .reader import FORMAT, read_header
from .sums import seal, sound_part

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
        self._sum = 0
        self._is_cut = False  # a write failed: nothing is written any more
        self._has_ended = False
        self.has_begun = False

    def header(self, **fields: Scalar | list[Scalar]) -> None:
        """The first line: what kind of run it is."""
        self._line({"kind": "run", "format": FORMAT, **fields})

    def mark(self) -> int:
        """The length in bytes of what was written: where a checkpoint of now stands in it."""
        self.flush()
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

        Where the trace was damaged before that, it is cut off there, and a note says so: the run is
        worth more than what a report can say of its past.

        Args:
            header: what the first line of a new run would say; what differs is written down.
        """
        sound_bytes, total = sound_part(self.path, at_bytes)
        was = read_header(self.path).fields if sound_bytes else header
        changes = {name: now for name, now in header.items() if was.get(name) != now}
        with self.path.open("rb") as file:
            file.seek(at_bytes)
            lost = sum(line.startswith(b'{"kind":"apply"') for line in file)
        self._sum = total
        self._file.truncate(sound_bytes)
        self._file.seek(sound_bytes)
        if not sound_bytes:
            self.header(**header)
        if sound_bytes < at_bytes:
            self.note(
                t, f"the trace was damaged: {at_bytes - sound_bytes:,} bytes before version "
                f"{version} are lost to every report"
            )  # fmt: skip
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
        (member, serial, version), num_samples, loss, is_finite, at_s, weight, kept, unused = fact
        added = f',"add":{add_s:.6f}' if add_s else ""
        if weight is not None:
            added += f',"weight":{weight!r}'
        if kept or unused:
            added += f',"kept":{[*kept]},"unused":{[*unused]}'
        # JSON has no nan: a loss that is none is null. repr() gives the float back bit for bit.
        self._write(
            f'{{"kind":"pushed","t":{at_s!r},"ticket":[{member},{serial},{version}],'
            f'"samples":{num_samples},"loss":{loss if -math.inf < loss < math.inf else "null"},'
            f'"finite":{"true" if is_finite else "false"},"compute":{compute_s:.6f},'
            f'"wait":{wait_s:.6f},"push":{push_s:.6f}{added}'
        )

    def order(self, order: Order, t: float) -> None:
        """An order of the coordinator."""
        if isinstance(order, Grant):
            leases = f'"leases":{_lists(order.leases)},"upcoming":{_lists(order.upcoming)}'
            self._write(f'{{"kind":"grant","t":{t:.6f},"ticket":{[*order.ticket]},{leases}')
        elif isinstance(order, Apply):
            self._write(
                f'{{"kind":"apply","t":{t:.6f},"tickets":{_lists(order.tickets)},'
                f'"weights":{[*order.weights]}'
            )
        elif isinstance(order, Cancel):
            self._write(f'{{"kind":"cancel","t":{t:.6f},"member":{order.member}')
        elif isinstance(order, EpochEnd):
            left = f',"unused":{order.num_unused}' if order.num_unused else ""
            self._write(
                f'{{"kind":"epoch_end","t":{t:.6f},"epoch":{order.epoch},'
                f'"version":{order.version}{left}'
            )
        elif isinstance(order, Retire):
            self._write(f'{{"kind":"retire","t":{t:.6f},"tickets":{_lists(order.tickets)}')
        else:
            kind = "discard" if isinstance(order, Discard) else "late"
            self._write(f'{{"kind":"{kind}","t":{t:.6f},"ticket":{[*order.ticket]}')

    def superseded(
        self, t: float, member: int, serial: int, wasted_s: float, saved_s: float
    ) -> None:
        """Work that was abandoned: seconds thrown away, and those that abandoning it saved."""
        self._write(
            f'{{"kind":"superseded","t":{t:.6f},"member":{member},"serial":{serial},'
            f'"wasted":{wasted_s:.6f},"saved":{saved_s:.6f}'
        )

    def scaled(self, t: float, ticket: Ticket, scale: float) -> None:
        """What distance left of a push that is in an update, where the update was executed."""
        self._write(f'{{"kind":"scaled","t":{t:.6f},"ticket":{[*ticket]},"scale":{float(scale)!r}')

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
        if self._is_cut:
            return
        try:
            self._file.flush()
        except OSError:
            self._is_cut = True
            raise

    def close(self) -> None:
        """Write what is buffered and close; may be called twice.

        A disk that was full has taken a part of what was buffered, and may have room again: what
        stands behind the last whole line is cut off.
        """
        if self._file.closed:
            return
        try:
            with suppress(OSError) if self._is_cut else nullcontext():
                self._file.close()
        except OSError:
            self._is_cut = True
            raise
        finally:
            if self._is_cut:
                with suppress(OSError):
                    os.truncate(self.path, sound_part(self.path, self.path.stat().st_size)[0])

    def _line(self, fields: Mapping[str, object]) -> None:
        self._write(json.dumps(fields, separators=(",", ":"), allow_nan=False)[:-1])

    def _write(self, body: str) -> None:
        """One line; ``body`` is an object without its closing brace."""
        if self._is_cut:
            return
        line, self._sum = seal(body, self._sum)
        try:
            self._file.write(line)
        except OSError:
            self._is_cut = True
            raise


def _lists(rows: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """Named tuples as lists, whose text is JSON."""
    return [[*row] for row in rows]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
