"""Two ways to compute, measured in turn until it is clear which is faster.

    base other | other base | base other | ...        a ratio for each pair

What else goes on at a machine meets both, and what they do to each other's caches changes sides.
This module must not know what is measured.
"""

import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

WORTH = 1.02
"""What is kept is faster by more than 2 %."""
_BLOCK_S = 0.06
"""A block of steps takes at least this: a clock's and a scheduler's grain disappear in it."""
_LEAST_PAIRS, _MOST_PAIRS = 4, 12


class Timed(Protocol):
    """One way to compute."""

    def block_s(self, num_steps: int) -> float:
        """Seconds a step, over so many of them."""


def compare(
    base: Timed, other: Timed, limit_s: float, times: tuple[list[float], list[float]] | None = None
) -> list[float]:
    """Ratios of base : other, pair by pair, the order of the two turning each time.

    It ends early when the middle half of the pairs lies clearly on one side of what is kept.
    """
    ratios: list[float] = []
    num_steps = max(1, round(_BLOCK_S / max(1e-6, base.block_s(1))))
    start_s = perf_counter()
    while len(ratios) < _MOST_PAIRS:
        if ratios and perf_counter() - start_s > limit_s:
            break
        if len(ratios) >= _LEAST_PAIRS and _is_clear(ratios):
            break
        first, second = (base, other) if len(ratios) % 2 else (other, base)
        seconds = {id(first): first.block_s(num_steps)}
        seconds[id(second)] = second.block_s(num_steps)
        ratios.append(seconds[id(base)] / seconds[id(other)])
        if times is not None:
            times[0].append(seconds[id(base)])
            times[1].append(seconds[id(other)])
    return ratios


def _is_clear(ratios: Sequence[float]) -> bool:
    low, _, high = quartiles(ratios)
    margin = (high - low) / 2
    return low - margin > WORTH or high + margin < WORTH


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
