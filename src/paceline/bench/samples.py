"""Repeated times: of one piece of work, of several in turn, of two at once; and their tables.

A single time means little on a machine with other work. So a result is a median with its spread,
and contenders take turns, so that other work affects all of them.

    one alone     |########|
    other alone   |#####|
    at once       |#########|            overlap = (one + other - both) / shorter, here 4/5

1 means that the shorter one cost nothing, 0 that they ran one after the other, less than 0 that
they slowed each other down. This module must not know what is measured.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from ..errors import ConfigError
from ..report.text import table, three_figures

_CLEAR = 0.75
"""Share of the blocks that must agree before a contender counts as faster or slower."""
_NOISE = 0.1
"""Share of a time that counts as noise."""


class Measured:
    """Base of result dataclasses: their JSON has the fields by name."""

    __slots__ = ()

    def to_json(self) -> dict[str, object]:
        """Return the result as one JSON object."""
        names = (field.name for field in fields(self))  # type: ignore[arg-type]  # the subclasses are dataclasses
        return {name: _json(getattr(self, name)) for name in names}


def _json(value: object) -> object:
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _json(item) for name, item in value.items()}
    if isinstance(value, Measured):
        return value.to_json()
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(Measured):
    """Repeated times of one piece of work.

    Args:
        name: of the work.
        samples_s: at least one time, in seconds, in the order measured.
    """

    name: str
    samples_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples_s:
            raise ConfigError(f"{self.name}: nothing has been measured; enter the benchmark first")

    @property
    def median_s(self) -> float:
        """The median time, in seconds."""
        return statistics.median(self.samples_s)

    @property
    def least_s(self) -> float:
        """The shortest time, in seconds."""
        return min(self.samples_s)

    @property
    def most_s(self) -> float:
        """The longest time, in seconds."""
        return max(self.samples_s)

    @property
    def mean_s(self) -> float:
        """The mean time, in seconds."""
        return statistics.fmean(self.samples_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The lower and the upper quartile, in seconds."""
        if len(self.samples_s) == 1:
            return self.samples_s[0], self.samples_s[0]
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return low, high

    def to_json(self) -> dict[str, object]:
        """Return median and spread as one JSON object, in seconds."""
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
    """Let each contender measure once a round; each round begins with the next contender.

    Args:
        contenders: name -> a function that does the work once and returns its seconds.
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
    """A contender compared with a baseline that took turns with it, block by block.

    Args:
        speedup: median of the baseline's time over the contender's.
        call_s: median of the baseline's time less the contender's, for one call.
        is_faster: True: faster in at least 3/4 of the blocks; False: slower in as many; None:
            neither.
    """

    speedup: float
    call_s: float
    is_faster: bool | None


def gain_of(baseline: Timing, contender: Timing) -> Gain:
    """Return the contender's gain over the baseline, from blocks that took turns."""
    pairs = list(zip(baseline.samples_s, contender.samples_s, strict=True))
    share = sum(new_s < old_s for old_s, new_s in pairs) / len(pairs)
    return Gain(
        speedup=statistics.median(old_s / new_s for old_s, new_s in pairs),
        call_s=statistics.median(old_s - new_s for old_s, new_s in pairs),
        is_faster=True if share >= _CLEAR else False if share <= 1 - _CLEAR else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTogether(Measured):
    """Times of two pieces of work, alone and together.

    Args:
        name: of this way to do both.
        one: times of the first alone.
        other: times of the second alone.
        both: times of both together.
    """

    name: str
    one: Timing
    other: Timing
    both: Timing

    @property
    def overlap(self) -> float | None:
        """The share of the shorter work that was hidden, from the least times; at most 1.

        Other work on the machine only makes a time longer, and a difference of three times includes
        it three times, so the least times are compared. None: both together took less than the
        longer one alone, which is impossible without a disturbance.
        """
        longer_s = max(self.one.least_s, self.other.least_s)
        if self.both.least_s < (1 - _NOISE) * longer_s:
            return None
        return min(1.0, overlap_of(self.one.least_s, self.other.least_s, self.both.least_s))

    def to_json(self) -> dict[str, object]:
        """Return the result as one JSON object."""
        return {**Measured.to_json(self), "overlap": self.overlap}


def overlap_of(one_s: float, other_s: float, both_s: float) -> float:
    """Return the share of the shorter work that was hidden, from three times in seconds.

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
    """Time the three in turns after one untimed round; each function returns its seconds."""
    contenders = {"one": one, "other": other, "both": both}
    for work in contenders.values():
        work()
    return TimedTogether(name=name, **take_turns(contenders, num_rounds))


def render_together(rows: Sequence[TimedTogether], one: str, other: str) -> list[str]:
    """Return a table with one row for each way."""
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
    """Return the quartiles in words, such as ``40.1 to 42.0 us``."""
    if timing is None:
        return "-"
    low, high = (three_figures(value) for value in timing.quartiles_s)
    (low_number, low_unit), (_, high_unit) = low.split(), high.split()
    return f"{low_number} to {high}" if low_unit == high_unit else f"{low} to {high}"
