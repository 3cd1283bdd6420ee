"""The lines of a trace as values: facts, orders and measurements.

Readers of a trace (the report, the replay) get these and never a dictionary. Facts and orders are
the classes of ``events.py``, so that a replay can use them as they are. Each line ends with the
sum, a CRC-32, of all lines so far:

    {"kind":"note","t":0.1,"text":"hello"   ,"sum":2774135281}
    |--------------- body --------------|

It covers the bodies of this line and of all before it, so that a line that was changed, lost, added
or moved is detected. It protects against accidents, not against attackers. This module must not
know who writes a trace, or why.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, TypeAlias

from ..events import Fact, Order, Pushed, Ticket

Scalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line: describes the run."""

    fields: Mapping[str, Scalar | list[Scalar]]

    def text(self, name: str, default: str = "") -> str:
        """Return a field as text."""
        value = self.fields.get(name)
        return default if value is None else str(value)

    def number(self, name: str, default: int = 0) -> int:
        """Return a field as an integer."""
        value = self.fields.get(name)
        return int(value) if isinstance(value, int | float) else default

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a list, as texts."""
        value = self.fields.get(name)
        return tuple(str(item) for item in value) if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A fact other than a push; Joined has a seat and a process id, Left has a reason."""

    fact: Fact
    worker: int | None = None
    pid: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A push, and where its member's seconds went since its previous push."""

    fact: Pushed
    compute_s: float
    wait_s: float
    push_s: float
    add_s: float = 0.0
    """Part of ``push_s``: adding the previous push to the sum of its update."""
    input_s: float = 0.0
    """Part of ``compute_s``: waiting for its batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """An order of the coordinator."""

    t_s: float
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class SupersededRecord:
    """Work that was abandoned: the seconds it wasted, and those that abandoning it saved."""

    t_s: float
    ticket: Ticket
    """Its version is not recorded and is -1."""
    wasted_s: float
    saved_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """The factor that ``distance`` applied to a push in an update: above 0, at most 1."""

    t_s: float
    ticket: Ticket
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation at one version: per metric the sum over samples and the number of samples."""

    t_s: float
    epoch: int
    version: int
    totals: Mapping[str, tuple[float, float]]

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric; None if it was not measured, or is not finite."""
        total, count = self.totals.get(name, (0.0, 0.0))
        return total / count if count and math.isfinite(total) else None

    def means(self) -> dict[str, float]:
        """Return the mean of every metric that was measured; nan if it is not finite."""
        return {name: total / count for name, (total, count) in self.totals.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Values that a member logged."""

    t_s: float
    member: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """From here on other members continue the run; unfinished leases are free again.

    Attributes:
        workers: number of these members.
        lost: updates that were made after this version; they were removed from the trace.
        changes: fields of the header that differ from here on, with their new values.
    """

    t_s: float
    version: int
    workers: int
    lost: int
    changes: Mapping[str, Scalar | list[Scalar]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A sentence about the run."""

    t_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """An injected fault happened; the text is its specification."""

    t_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerouted:
    """From here on gradients take this path: ``peers`` or ``store``."""

    t_s: float
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnded:
    """The stream of this epoch has ``end`` mini-batches."""

    t_s: float
    epoch: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRecord:
    """The run was told to stop: what is pushed from here on is late."""

    t_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last line of a run that ended normally."""

    t_s: float
    reason: str


Record: TypeAlias = (
    Header | Heard | Handed | Ordered | SupersededRecord | Scaled | Evaluated | Logged | Resumed
    | Noted | Struck | Rerouted | StreamEnded | StopRecord | Ended
)  # fmt: skip


LONGEST_BYTES = 1 << 26
"""Limit of a line: a grant of a million leases takes less."""
_MARK = ',"sum":'


def seal(body: str, before: int) -> tuple[str, int]:
    """Return a line as it is written, and its sum.

    Args:
        body: a JSON object without its closing brace.
        before: the sum of the previous line; 0: there is none.
    """
    total = zlib.crc32(body.encode(), before)
    return f"{body}{_MARK}{total}}}\n", total


def opened(line: bytes, before: int) -> tuple[bytes, int]:
    """Return the body of a line, and its sum; raise ValueError if the sum is wrong."""
    body, mark, end = line.rpartition(_MARK.encode())
    total = zlib.crc32(body, before)
    if not mark or end != b"%d}\n" % total:
        raise ValueError("its checksum is wrong: this line, or one before it, was changed")
    return body, total


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Return the lines of a trace; a line that is too long is cut."""
    return iter(partial(file.readline, LONGEST_BYTES), b"")


def sound_part(
    file: BinaryIO, num_bytes: int, is_behind: Callable[[bytes], bool] = lambda line: False
) -> tuple[int, int]:
    """Return how many of the first ``num_bytes`` are undamaged lines, and the last line's sum.

    Args:
        is_behind: returns whether to stop before a line.
    """
    sound_bytes, total = 0, 0
    for line in lines_of(file):
        try:
            _, next_total = opened(line, total)
        except ValueError:
            break
        if sound_bytes + len(line) > num_bytes or is_behind(line):
            break
        sound_bytes, total = sound_bytes + len(line), next_total
    return sound_bytes, total
