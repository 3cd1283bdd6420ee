"""Several measured times: of one thing, of things in turn, of two things at once; how they print.

One time says little: a machine has other things to do. So a result is a median with its spread,
and what is compared takes turns, so that what else goes on meets all of it.

    one alone     |########|
    other alone   |#####|
    at once       |#########|            overlap = (one + other - both) / shorter, here 4/5

1 means that the shorter one cost nothing, 0 that they ran one after the other, less than 0 that
they were in each other's way. This module must not know what is measured.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from ..errors import ConfigError
from ..report.text import table, three_figures

_CLEAR = 0.75
"""Share of the blocks that must agree before one is called faster or slower."""
_NOISE = 0.1
"""Share of a time that is not worth a word."""


class Measured:
    """A result as a dataclass; as JSON its fields by name."""

    __slots__ = ()

    def to_json(self) -> dict[str, object]:
        """As one JSON object."""
        names = (field.name for field in fields(self))  # type: ignore[arg-type]  # its children are
        return {name: _json(getattr(self, name)) for name in names}


def _json(value: object) -> object:
    if isinstance(value, tuple):
        return [_json(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _json(one) for name, one in value.items()}
    if isinstance(value, Measured):
        return value.to_json()
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(Measured):
    """Times of one thing.

    Args:
        name: of what was measured.
        samples_s: at least one time, in seconds, in the order measured.
    """

    name: str
    samples_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples_s:
            raise ConfigError(f"{self.name}: nothing was measured; enter the benchmark first")

    @property
    def median_s(self) -> float:
        """The middle one, in seconds."""
        return statistics.median(self.samples_s)

    @property
    def least_s(self) -> float:
        """The shortest, in seconds."""
        return min(self.samples_s)

    @property
    def most_s(self) -> float:
        """The longest, in seconds."""
        return max(self.samples_s)

    @property
    def mean_s(self) -> float:
        """What one costs when many are done, in seconds."""
        return statistics.fmean(self.samples_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Half of the times lie between these two, in seconds."""
        if len(self.samples_s) == 1:
            return self.samples_s[0], self.samples_s[0]
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return low, high

    def to_json(self) -> dict[str, object]:
        """Median and spread as one JSON object, in seconds."""
        low, high = self.quartiles_s
        return {
            "name": self.name,
            "count": len(self.samples_s),
            "median_s": self.median_s,
            "mean_s": self.mean_s,
            "least_s": self.least_s,
            "most_s": self.most_s,
            "quartiles_s": [low, high],
        }


def take_turns(contenders: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, Timing]:
    """Let each contender measure once a round, beginning with another one each round.

    Args:
        contenders: name -> a function that does its work once and returns its seconds.
        num_rounds: >= 1.

    Returns:
        name -> the times of all rounds.
    """
    names: Sequence[str] = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            samples[name].append(contenders[name]())
    return {name: Timing(name=name, samples_s=tuple(times)) for name, times in samples.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain(Measured):
    """One thing beside another that took turns with it, block by block.

    Args:
        speedup: median of the other's time over its own.
        call_s: median of the other's time less its own, for one call.
        is_faster: in three of four blocks at least; False: slower in as many; None: not clear.
    """

    speedup: float
    call_s: float
    is_faster: bool | None


def gain_of(other: Timing, own: Timing) -> Gain:
    """What is gained, from blocks that were measured one after the other."""
    pairs = list(zip(other.samples_s, own.samples_s, strict=True))
    share = sum(ours < theirs for theirs, ours in pairs) / len(pairs)
    return Gain(
        speedup=statistics.median(theirs / ours for theirs, ours in pairs),
        call_s=statistics.median(theirs - ours for theirs, ours in pairs),
        is_faster=True if share >= _CLEAR else False if share <= 1 - _CLEAR else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTogether(Measured):
    """What two pieces of work came to.

    Args:
        name: of this way of doing both.
        one: times of the first alone.
        other: times of the second alone.
        both: times of both.
    """

    name: str
    one: Timing
    other: Timing
    both: Timing

    @property
    def overlap(self) -> float | None:
        """The share of the shorter one that was hidden, from the least time of each; at most 1.

        What else the machine does only ever makes a time longer, and a difference of three times
        shows it three times; so the least ones are compared. None: both at once took less than
        one of them alone, which cannot be; other work disturbed the measurement.
        """
        longer_s = max(self.one.least_s, self.other.least_s)
        if self.both.least_s < (1 - _NOISE) * longer_s:
            return None
        return min(1.0, overlap_of(self.one.least_s, self.other.least_s, self.both.least_s))

    def to_json(self) -> dict[str, object]:
        """As one JSON object."""
        return {**Measured.to_json(self), "overlap": self.overlap}


def overlap_of(one_s: float, other_s: float, both_s: float) -> float:
    """How much of the shorter one was hidden, from three times in seconds.

    Example:
        >>> overlap_of(8.0, 5.0, 9.0)
        0.8
    """
    return (one_s + other_s - both_s) / min(one_s, other_s)


def measure_together(
    name: str,
    one: Callable[[], float],
    other: Callable[[], float],
    both: Callable[[], float],
    num_rounds: int,
) -> TimedTogether:
    """Let the three take turns after one round that does not count; each returns its seconds."""
    contenders = {"one": one, "other": other, "both": both}
    for work in contenders.values():
        work()
    return TimedTogether(name=name, **take_turns(contenders, num_rounds))


def render_together(rows: Sequence[TimedTogether], one: str, other: str) -> list[str]:
    """A table, a row each."""
    cells = [
        (
            row.name,
            three_figures(row.one.median_s),
            three_figures(row.other.median_s),
            three_figures(row.both.median_s),
            f"{three_figures(row.both.least_s)} to {three_figures(row.both.most_s)}",
            "disturbed" if row.overlap is None else f"{row.overlap:.0%}",
        )
        for row in rows
    ]
    header = ("", f"{one} alone", f"{other} alone", "both", "least to most", "overlap")
    return [
        *table(header, cells),
        "times: medians; overlap: (one + other - both) / shorter, of the least times",
    ]


def quartiles(timing: Timing | None) -> str:
    """Where the middle half lies: ``40.1 to 42.0 us``."""
    if timing is None:
        return "-"
    low, high = (three_figures(value) for value in timing.quartiles_s)
    (number, unit), (_, other) = low.split(), high.split()
    return f"{number} to {high}" if unit == other else f"{low} to {high}"
