"""Several measured times of the same thing, and functions that are timed in turn.

One time says little: a machine has other things to do. So a result is a median with its spread,
and what is compared takes turns, so that what else goes on meets all of it. This module must not
know what is measured.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
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
