"""The lines of a trace as values: what was heard, what was ordered, what was measured.

A reader of a trace (the report, the replay) gets these and never a dictionary. Facts and orders are
those of ``events.py`` themselves, so that a replay can hand them on as they are. Each line ends
with the sum, a CRC-32, of all lines up to there:

    {"kind":"note","t":0.1,"text":"hello"   ,"sum":2774135281}
    |--------------- body --------------|

It goes over the bodies of this line and of all before it, so that a line that was changed, lost,
added or moved is found, whatever it still says. It is against accidents, not against attackers.
This module must not know who writes a trace, or why.
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
    """The first line: what kind of run it is."""

    fields: Mapping[str, Scalar | list[Scalar]]

    def text(self, name: str, default: str = "") -> str:
        """A field as text."""
        value = self.fields.get(name)
        return default if value is None else str(value)

    def number(self, name: str, default: int = 0) -> int:
        """A field as a whole number."""
        value = self.fields.get(name)
        return int(value) if isinstance(value, int | float) else default

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that is a list, as texts."""
        value = self.fields.get(name)
        return tuple(str(one) for one in value) if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A fact other than a push; a joiner comes with its seat, a leaver with its reason."""

    fact: Fact
    worker: int | None = None
    pid: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A push, and where its member's seconds went since the push before."""

    fact: Pushed
    compute_s: float
    wait_s: float
    push_s: float
    add_s: float = 0.0
    """Of ``push_s``: adding the push before to the sum of its update."""
    input_s: float = 0.0
    """Of ``compute_s``: until its batches were there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """An order of the coordinator."""

    t_s: float
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class SupersededRecord:
    """Work that was abandoned: the seconds thrown away, and those that abandoning it saved."""

    t_s: float
    ticket: Ticket
    """Its version is not recorded and is -1."""
    wasted_s: float
    saved_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """What distance left of a push that is in an update: over 0, at most 1."""

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
        """The mean of a metric; None where it was not measured, or is not finite."""
        total, count = self.totals.get(name, (0.0, 0.0))
        return total / count if count and math.isfinite(total) else None

    def means(self) -> dict[str, float]:
        """Of every metric that was measured; nan where it is not finite."""
        return {name: total / count for name, (total, count) in self.totals.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Values that a member logged."""

    t_s: float
    member: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """From here on other members go on with the run; leases that were at work are free again.

    Attributes:
        workers: how many they are.
        lost: updates that had been made after this version; they were taken out of the trace.
        changes: fields of the header that are others from here on, with their values of now.
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
    """A fault that was ordered has happened; the text is how it was ordered."""

    t_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerouted:
    """From here on gradients go this way: ``peers`` or ``store``."""

    t_s: float
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnded:
    """The stream of this epoch was found to have so many mini-batches."""

    t_s: float
    epoch: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRecord:
    """The run was told to stop: what is pushed from here on is late."""

    t_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last line of a run that ended in order."""

    t_s: float
    reason: str


Record: TypeAlias = (
    Header | Heard | Handed | Ordered | SupersededRecord | Scaled | Evaluated | Logged | Resumed
    | Noted | Struck | Rerouted | StreamEnded | StopRecord | Ended
)  # fmt: skip


LONGEST_BYTES = 1 << 26
"""Of a line: a grant of a million leases takes less."""
_MARK = ',"sum":'


def seal(body: str, before: int) -> tuple[str, int]:
    """A line as it is written, and its sum.

    Args:
        body: a JSON object without its closing brace.
        before: the sum of the line before; 0: there is none.
    """
    now = zlib.crc32(body.encode(), before)
    return f"{body}{_MARK}{now}}}\n", now


def opened(line: bytes, before: int) -> tuple[bytes, int]:
    """The body of a line, and its sum. ValueError where that is not the one it should have."""
    body, mark, end = line.rpartition(_MARK.encode())
    now = zlib.crc32(body, before)
    if not mark or end != b"%d}\n" % now:
        raise ValueError("its sum is another: this line, or one before it, is not what was written")
    return body, now


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a trace; one that is longer than any is cut."""
    return iter(partial(file.readline, LONGEST_BYTES), b"")


def sound_part(
    file: BinaryIO, num_bytes: int, is_behind: Callable[[bytes], bool] = lambda line: False
) -> tuple[int, int]:
    """How many of the first bytes are lines as they were written, and the last one's sum.

    Args:
        is_behind: whether a line is none of them, nor what follows it.
    """
    found, now = 0, 0
    for line in lines_of(file):
        try:
            _, following = opened(line, now)
        except ValueError:
            break
        if found + len(line) > num_bytes or is_behind(line):
            break
        found, now = found + len(line), following
    return found, now
