"""Decide whether a fix saves 2 % of a step, from pairs of blocks with and without it.

    A B | B A | A B | ...        log(A : B) of each pair; mean, and its 95 % interval by Student's t

Other load on the machine affects both sides. The comparison ends early once the interval is on one
side of 2 %; if it never is, the answer is that the fix is not distinguishable from noise. This module must
not know what a fix is, nor measure.

Source: Georges, Buytaert, Eeckhout, Statistically Rigorous Java Performance Evaluation, OOPSLA
2007, section 3.2 (intervals by Student's t for few samples).
"""

import math
import statistics
from typing import NamedTuple

from .observation import PriceOutcome

WORTH = 0.02
"""Share of a step; a fix that saves less is not suggested."""
LEAST_PAIRS, MOST_PAIRS = 3, 12
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom."""
_MAX_LOG = 10.0
"""The largest logarithm of a ratio that is told apart; it keeps the exponential finite."""


class Saved(NamedTuple):
    """The share of a step that a fix saves, with its 95 % interval."""

    middle: float
    low: float
    high: float


class Pairs:
    """The seconds of a step without a fix and with it, pair by pair."""

    def __init__(self) -> None:
        self._logs: list[float] = []

    def add(self, without_s: float, with_s: float) -> None:
        """Add one pair: the seconds of a step without the fix, and with it."""
        self._logs.append(math.log(max(without_s, 1e-9) / max(with_s, 1e-9)))

    def __len__(self) -> int:
        return len(self._logs)

    def saved(self) -> Saved:
        """The share of the step without the fix that the fix saves."""
        middle = statistics.fmean(self._logs)
        if len(self._logs) < 2:
            return Saved(_share(middle), _share(-_MAX_LOG), 1.0)
        half = (
            _T95[min(len(self._logs) - 1, len(_T95)) - 1]
            * statistics.stdev(self._logs) / math.sqrt(len(self._logs))
        )  # fmt: skip
        return Saved(_share(middle), _share(middle - half), _share(middle + half))

    def outcome(self) -> PriceOutcome:
        """What the interval decides so far."""
        saved = self.saved()
        if saved.low > WORTH:
            return PriceOutcome.WORTH
        return PriceOutcome.NOTHING if saved.high < WORTH else PriceOutcome.UNKNOWN

    def is_done(self) -> bool:
        """Whether the outcome is clear, or there are enough pairs to give up."""
        is_clear = len(self) >= LEAST_PAIRS and self.outcome() is not PriceOutcome.UNKNOWN
        return is_clear or len(self) >= MOST_PAIRS


def _share(log: float) -> float:
    return 1.0 - math.exp(-max(log, -_MAX_LOG))
