"""Writing a trace: a push costs a few microseconds here, and a disk that is full costs no run.

    line -> sum -> waiting -> file        a few times a second, and before a checkpoint

Lines are formatted by hand. What the file does not take waits here until it does, so a disk that
has room again has the whole trace; where too much waits, the trace ends for good. A file that
somebody has deleted is written anew. Above 300 lines because each kind of line has its writer here.
This module must not know engines or reports.
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
"""So much is kept for a file that takes nothing: about 300,000 pushes."""
_COPY_BYTES = 1 << 20


class Trace:
    """Writes the trace of one run.

    Args:
        goes_on: the file is an earlier part of the run; it is not changed before ``go_on``. Where
            somebody has deleted it, it begins anew.
        place: the folder of ``path``, if that is open already.

    Invariant: after ``close`` every line in the file is whole, and nothing stands after the end
    (``tests/trace/test_trace.py``).

    Attributes:
        has_begun: whether a member joined: the plan was accepted.
        trouble: why the file takes nothing now; empty: it does.
        is_cut: it ends here for good: too much would have had to wait.
        within: the identity of the folder that it lies in.
    """

    def __init__(
        self, path: Path, *, goes_on: bool = False, place: OpenFolder | None = None
    ) -> None:
        self.path = path
        with nullcontext(place) if place else closing(OpenFolder.open(path.parent)) as here:
            self.within = here.identity
            is_there = goes_on and here.has(path.name)
            fd = here.again(path.name) if is_there else here.fresh(path.name)
        self._file = os.fdopen(fd, "r+b", 0)
        self._waiting = bytearray()
        self._sum = 0
        self._has_ended = False
        self.has_begun = False
        self.trouble = ""
        self.is_cut = False

    def header(self, **fields: Scalar | list[Scalar]) -> None:
        """The first line: what kind of run it is."""
        self._line({"kind": "run", "format": FORMAT, **fields})

    def mark(self) -> int:
        """The length in bytes of what was written: where a checkpoint of now stands in it.

        Raises:
            OSError: a part of it is not written.
        """
        self._restore()
        self.flush()
        if self._waiting:
            raise OSError(f"the trace cannot be written: {self.trouble}")
        return self._file.tell()

    def copy(self, path: Path) -> int:
        """Write all of it to another file, also what waits; its length in bytes. OSError: none."""
        with (
            closing(OpenFolder.open(path.parent)) as place,
            os.fdopen(place.new(path.name), "wb") as to,
        ):
            self._copy_to(to)
            return to.tell()

    def _copy_to(self, other: BinaryIO) -> None:
        for start in range(0, self._file.tell(), _COPY_BYTES):
            count = min(_COPY_BYTES, self._file.tell() - start)
            other.write(os.pread(self._file.fileno(), count, start))
        other.write(self._waiting)
        other.flush()

    def _restore(self) -> None:
        """Write the file anew where somebody has deleted it: all of it is still here."""
        if os.fstat(self._file.fileno()).st_nlink:
            return
        folder = self.path.parent
        with closing(
            OpenFolder.open(folder) if folder.exists() else OpenFolder.make(folder)
        ) as place:
            other = os.fdopen(place.new(self.path.name), "r+b", 0)
            try:
                self._copy_to(other)
            except OSError:
                other.close()
                place.remove_file(self.path.name)
                raise
            self.within = place.identity
        self._file.close()
        self._file = other
        self._waiting.clear()

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
        worth more than what a report can say of its past. From then on ``at_bytes`` of this
        checkpoint, and of those before it, says nothing: the line that resumes there says where.

        Args:
            header: what the first line of a new run would say; what differs is written down.
        """
        fd = self._file.fileno()
        here = name_of(fd, self.path)
        with open_to_read(here) as file:
            sound_bytes, total = sound_part(file, at_bytes, partial(_has_lost, version))
            file.seek(sound_bytes)
            was_cut = _has_lost(version, file.readline(LONGEST_BYTES))
            file.seek(sound_bytes if was_cut else min(at_bytes, os.fstat(fd).st_size))
            whole = takewhile(lambda line: line.endswith(b"\n"), lines_of(file))
            lost = sum(line.startswith(b'{"kind":"apply"') for line in whole)
        was = read_header(here).fields if sound_bytes else header
        changes = {name: now for name, now in header.items() if was.get(name) != now}
        self._sum = total
        self._file.truncate(sound_bytes)
        self._file.seek(sound_bytes)
        if not sound_bytes:
            self.header(**header)
        is_cut_now = sound_bytes < at_bytes and not was_cut
        if is_cut_now:
            self.note(
                t, f"the trace was damaged: {at_bytes - sound_bytes:,} bytes before version "
                f"{version} are lost to every report"
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
        """A push, and where its member's seconds went since the push before."""
        (member, serial, version), num_samples, loss, is_finite, at_s, weight, kept, unused = fact
        added = f',"add":{add_s:.6f}' if add_s else ""
        if input_s:
            added += f',"input":{input_s:.6f}'
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

    def stream_ended(self, t: float, epoch: int, end: int) -> None:
        self._line({"kind": "stream_ended", "t": t, "epoch": epoch, "end": end})

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
            with suppress(OSError):  # it is said of the last checkpoint, too
                self._restore()
            self.flush()

    def flush(self) -> None:
        """Hand what was written to the operating system: it then survives this process."""
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
            self.trouble = ""
        except OSError as error:
            self.trouble = error.strerror or str(error)
            if len(self._waiting) > _MOST_WAITING_BYTES:
                self._cut()

    def close(self) -> None:
        """Write what waits and close; may be called twice."""
        if self._file.closed:
            return
        self.flush()
        if self._waiting:
            self._cut()
        with suppress(OSError):  # some file systems say only now what they could not keep
            self._file.close()

    def _cut(self) -> None:
        """Nothing more is written; what stands behind the last whole line goes."""
        self.is_cut = True
        self._waiting.clear()
        with suppress(OSError), open_to_read(name_of(self._file.fileno(), self.path)) as file:
            self._file.seek(self._file.truncate(sound_part(file, sys.maxsize)[0]))

    def _line(self, fields: Mapping[str, object]) -> None:
        self._write(json.dumps(fields, separators=(",", ":"), allow_nan=False)[:-1])

    def _write(self, body: str) -> None:
        """One line; ``body`` is an object without its closing brace."""
        if self.is_cut:
            return
        line, self._sum = seal(body, self._sum)
        self._waiting += line.encode()
        if len(self._waiting) >= _BUFFER_BYTES and not self.trouble:
            self.flush()


def _has_lost(version: int, line: bytes) -> bool:
    """Whether the run was resumed here, at this version or a later one, behind what was damaged."""
    if not line.startswith(b'{"kind":"resumed"'):
        return False
    try:
        fields = json.loads(line)
        return bool(fields.get("is_damaged") and fields["version"] >= version)
    except (ValueError, KeyError, TypeError, RecursionError):  # it is damaged itself
        return False


def _lists(rows: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """Named tuples as lists, whose text is JSON."""
    return [[*row] for row in rows]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
