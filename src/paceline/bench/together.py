"""Two pieces of work, alone and at once, and how much of the shorter one was hidden.

    one alone     |########|
    other alone   |#####|
    at once       |#########|            overlap = (one + other - both) / shorter, here 4/5

1 means that the shorter one cost nothing, 0 that they ran one after the other, less than 0 that
they were in each other's way. This module must not know what the work is.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .lines import duration, table
from .samples import Timing, take_turns

_NOISE = 0.1
"""Share of a time that is not worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTogether:
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
        return {
            "name": self.name,
            "one": self.one.to_json(),
            "other": self.other.to_json(),
            "both": self.both.to_json(),
            "overlap": self.overlap,
        }


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
    for work in (one, other, both):
        work()
    found = take_turns({"one": one, "other": other, "both": both}, num_rounds)
    return TimedTogether(name=name, one=found["one"], other=found["other"], both=found["both"])


def render_together(rows: tuple[TimedTogether, ...], one: str, other: str) -> list[str]:
    """A table, a row each."""
    cells = [
        (
            row.name,
            duration(row.one.median_s),
            duration(row.other.median_s),
            duration(row.both.median_s),
            f"{duration(row.both.least_s)} to {duration(row.both.most_s)}",
            "disturbed" if row.overlap is None else f"{row.overlap:.0%}",
        )
        for row in rows
    ]
    header = ("", f"{one} alone", f"{other} alone", "both", "least to most", "overlap")
    return [
        *table(header, cells),
        "times: medians; overlap: (one + other - both) / shorter, of the least times",
    ]
