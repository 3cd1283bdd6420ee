"""Writes a trace: a push costs a few microseconds, and a full disk does not end the run.

    line -> sum -> waiting -> file        a few times a second, and before a checkpoint

Lines are formatted by hand for speed. Lines that the file cannot take wait here, so the trace is
complete once the disk has room again; if too much waits, the trace ends for good. A deleted file is
written again. Above 300 lines because each kind of line has its writer here. This module must not
know engines or reports.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing, nullcontext, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from ..events import Apply, Cancel, Discard, EpochEnd, Grant, Order, Pushed, Retire, Ticket
from ..system.files import OpenFolder, name_of, open_to_read
from .reader import FORMAT, read_header
from .records import LONGEST_BYTES, Scalar, lines_of, seal, sound_part

_BUFFER_BYTES = 1 << 16
_MOST_WAITING_BYTES = 1 << 26
"""Limit of the lines that wait while the file cannot be written: about 300,000 pushes."""
_COPY_BYTES = 1 << 20


class Trace:
    """Writes the trace of one run.

    Args:
        goes_on: whether the file is an earlier part of the run, which is not changed before
            ``go_on``; if it was deleted, a new file is created.
        place: the folder of ``path``, if that is open already.

    Invariant: after ``close`` every line in the file is complete, and nothing follows the end
    (``tests/trace/test_trace.py``).

    Attributes:
        has_begun: whether a member joined: the plan was accepted.
        trouble: why the file cannot be written now; empty: it can.
        is_cut: whether it ended for good, since too much was waiting.
        within: the identity of its folder.
    """

    def __init__(
        self, path: Path, *, goes_on: bool = False, place: OpenFolder | None = None
    ) -> None:
        self.path = path
        with nullcontext(place) if place else closing(OpenFolder.open(path.parent)) as folder:
            self.within = folder.identity
            exists = goes_on and folder.has(path.name)
            fd = folder.again(path.name) if exists else folder.fresh(path.name)
        self._file = os.fdopen(fd, "r+b", 0)
        self._waiting = bytearray()
        self._sum = 0
        self._has_ended = False
        self.has_begun = False
        self.trouble = ""
        self.is_cut = False

    def header(self, **fields: Scalar | list[Scalar]) -> None:
        """Write the first line, which describes the run."""
        self._line({"kind": "run", "format": FORMAT, **fields})

    def mark(self) -> int:
        """Return the bytes written so far, which is where a checkpoint made now belongs.

        Raises:
            OSError: a part could not be written.
        """
        self._restore()
        self.flush()
        if self._waiting:
            raise OSError(f"the trace cannot be written: {self.trouble}")
        return self._file.tell()

    def copy(self, path: Path) -> int:
        """Write all lines, also those that wait, to another file; return its length in bytes.

        Raises:
            OSError: it cannot be written.
        """
        with (
            closing(OpenFolder.open(path.parent)) as place,
            os.fdopen(place.new(path.name), "wb") as target,
        ):
            self._copy_to(target)
            return target.tell()

    def _copy_to(self, target: BinaryIO) -> None:
        for start in range(0, self._file.tell(), _COPY_BYTES):
            num_bytes = min(_COPY_BYTES, self._file.tell() - start)
            target.write(os.pread(self._file.fileno(), num_bytes, start))
        target.write(self._waiting)
        target.flush()

    def _restore(self) -> None:
        """Write the file again if it was deleted: the open descriptor still has all of it."""
        if os.fstat(self._file.fileno()).st_nlink:
            return
        folder = self.path.parent
        with closing(
            OpenFolder.open(folder) if folder.exists() else OpenFolder.make(folder)
        ) as place:
            restored = os.fdopen(place.new(self.path.name), "r+b", 0)
            try:
                self._copy_to(restored)
            except OSError:
                restored.close()
                place.remove_file(self.path.name)
                raise
            self.within = place.identity
        self._file.close()
        self._file = restored
        self._waiting.clear()

    def go_on(
        self,
        at_bytes: int,
        t: float,
        version: int,
        workers: int,
        header: Mapping[str, Scalar | list[Scalar]],
    ) -> int:
        """Truncate the trace after a checkpoint and continue from there.

        If the trace is damaged before that, it is truncated there, and a note says so: the run
        matters more than a report of its past. From then on ``at_bytes`` of this and of earlier
        checkpoints is meaningless: the ``resumed`` line marks the place.

        Args:
            header: the first line of a new run; fields that differ are recorded.

        Returns:
            How many updates were cut off.
        """
        fd = self._file.fileno()
        readable_path = name_of(fd, self.path)
        with open_to_read(readable_path) as file:
            sound_bytes, total = sound_part(file, at_bytes, partial(_has_lost, version))
            file.seek(sound_bytes)
            was_cut = _has_lost(version, file.readline(LONGEST_BYTES))
            file.seek(sound_bytes if was_cut else min(at_bytes, os.fstat(fd).st_size))
            complete = takewhile(lambda line: line.endswith(b"\n"), lines_of(file))
            lost = sum(line.startswith(b'{"kind":"apply"') for line in complete)
        old_header = read_header(readable_path).fields if sound_bytes else header
        changes = {name: new for name, new in header.items() if old_header.get(name) != new}
        self._sum = total
        self._file.truncate(sound_bytes)
        self._file.seek(sound_bytes)
        if not sound_bytes:
            self.header(**header)
        is_cut_now = sound_bytes < at_bytes and not was_cut
        if is_cut_now:
            self.note(
                t, f"the trace was damaged: {at_bytes - sound_bytes:,} bytes before version "
                f"{version} are missing from every report"
            )  # fmt: skip
        self._line(
            {"kind": "resumed", "t": t, "version": version, "workers": workers, "lost": lost,
             "changes": changes, **({"is_damaged": True} if was_cut or is_cut_now else {})}
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
        self, fact: Pushed, compute_s: float, wait_s: float, push_s: float, add_s: float = 0.0,
        input_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Write a push, and where its member's seconds went since its previous push."""
        (member, serial, version), num_samples, loss, is_finite, at_s, weight, kept, unused = fact
        optional_fields = f',"add":{add_s:.6f}' if add_s else ""
        if input_s:
            optional_fields += f',"input":{input_s:.6f}'
        if weight is not None:
            optional_fields += f',"weight":{weight!r}'
        if kept or unused:
            optional_fields += f',"kept":{[*kept]},"unused":{[*unused]}'
        # JSON has no nan, so a loss that is not finite is null. repr() keeps every bit of a float.
        self._write(
            f'{{"kind":"pushed","t":{at_s!r},"ticket":[{member},{serial},{version}],'
            f'"samples":{num_samples},"loss":{loss if -math.inf < loss < math.inf else "null"},'
            f'"finite":{"true" if is_finite else "false"},"compute":{compute_s:.6f},'
            f'"wait":{wait_s:.6f},"push":{push_s:.6f}{optional_fields}'
        )

    def order(self, order: Order, t: float) -> None:
        """Write an order of the coordinator."""
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
            unused = f',"unused":{order.num_unused}' if order.num_unused else ""
            self._write(
                f'{{"kind":"epoch_end","t":{t:.6f},"epoch":{order.epoch},'
                f'"version":{order.version}{unused}'
            )
        elif isinstance(order, Retire):
            self._write(f'{{"kind":"retire","t":{t:.6f},"tickets":{_lists(order.tickets)}')
        else:
            kind = "discard" if isinstance(order, Discard) else "late"
            self._write(f'{{"kind":"{kind}","t":{t:.6f},"ticket":{[*order.ticket]}')

    def superseded(
        self, t: float, member: int, serial: int, wasted_s: float, saved_s: float
    ) -> None:
        """Write that work was abandoned: the seconds it wasted, and those that this saved."""
        self._write(
            f'{{"kind":"superseded","t":{t:.6f},"member":{member},"serial":{serial},'
            f'"wasted":{wasted_s:.6f},"saved":{saved_s:.6f}'
        )

    def scaled(self, t: float, ticket: Ticket, scale: float) -> None:
        """Write the factor that ``distance`` applied to a push as its update was executed."""
        self._write(f'{{"kind":"scaled","t":{t:.6f},"ticket":{[*ticket]},"scale":{float(scale)!r}')

    def evaluated(
        self, t: float, epoch: int, version: int, totals: Mapping[str, tuple[float, float]]
    ) -> None:
        """Write an evaluation at one version: per metric the sum over samples and their number."""
        rows = {name: [_finite(total), count] for name, (total, count) in totals.items()}
        self._line(
            {"kind": "evaluated", "t": t, "epoch": epoch, "version": version, "totals": rows}
        )

    def log(self, t: float, member: int, values: Mapping[str, float]) -> None:
        """Write values that a member logged."""
        finite = {name: _finite(value) for name, value in values.items()}
        self._line({"kind": "log", "t": t, "member": member, "values": finite})

    def fault(self, t: float, text: str) -> None:
        """Write that a fault is injected now."""
        self._line({"kind": "fault", "t": t, "text": text})

    def stream_ended(self, t: float, epoch: int, end: int) -> None:
        self._line({"kind": "stream_ended", "t": t, "epoch": epoch, "end": end})

    def note(self, t: float, text: str) -> None:
        self._line({"kind": "note", "t": t, "text": text})

    def rerouted(self, t: float, path: str) -> None:
        """Write that gradients take this path from here on."""
        self._line({"kind": "rerouted", "t": t, "path": path})

    def stopped(self, t: float) -> None:
        """Write that the run is told to stop."""
        self._line({"kind": "stopped", "t": t})

    def end(self, t: float, reason: str) -> None:
        """Write the last line; later calls write nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._line({"kind": "end", "t": t, "reason": reason})
            with suppress(OSError):  # the last checkpoint reports the same failure
                self._restore()
            self.flush()

    def flush(self) -> None:
        """Write to the file: the operating system then keeps it beyond this process."""
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
            self.trouble = ""
        except OSError as error:
            self.trouble = error.strerror or str(error)
            if len(self._waiting) > _MOST_WAITING_BYTES:
                self._cut()

    def close(self) -> None:
        """Write the waiting lines and close the file; may be called twice."""
        if self._file.closed:
            return
        self.flush()
        if self._waiting:
            self._cut()
        with suppress(OSError):  # some file systems report failed writes only now
            self._file.close()

    def _cut(self) -> None:
        """End the trace for good; truncate it after the last complete line."""
        self.is_cut = True
        self._waiting.clear()
        with suppress(OSError), open_to_read(name_of(self._file.fileno(), self.path)) as file:
            self._file.seek(self._file.truncate(sound_part(file, sys.maxsize)[0]))

    def _line(self, fields: Mapping[str, object]) -> None:
        self._write(json.dumps(fields, separators=(",", ":"), allow_nan=False)[:-1])

    def _write(self, body: str) -> None:
        """Write one line; ``body`` is an object without its closing brace."""
        if self.is_cut:
            return
        line, self._sum = seal(body, self._sum)
        self._waiting += line.encode()
        if len(self._waiting) >= _BUFFER_BYTES and not self.trouble:
            self.flush()


def _has_lost(version: int, line: bytes) -> bool:
    """Return whether the run resumed here, at ``version`` or later, after a damaged part."""
    if not line.startswith(b'{"kind":"resumed"'):
        return False
    try:
        fields = json.loads(line)
        return bool(fields.get("is_damaged") and fields["version"] >= version)
    except (ValueError, KeyError, TypeError, RecursionError):  # it is damaged itself
        return False


def _lists(rows: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """Return named tuples as lists, whose text is JSON."""
    return [[*row] for row in rows]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
