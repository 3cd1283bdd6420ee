"""Two ways to compute, measured in turn until it is clear which is faster.

    base other | other base | base other | ...        a ratio for each pair

What else goes on at a machine meets both, and what they do to each other's caches changes sides.
This module must not know what is measured.
"""

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol, TypeAlias

WORTH = 1.02
"""What is kept is faster by more than 2 %."""
_BLOCK_S = 0.06
"""A block of steps takes at least this: a clock's and a scheduler's grain disappear in it."""
_LEAST_PAIRS, _MOST_PAIRS = 4, 12


IMPLAUSIBLE = 4.0
"""A gain above this is measured again: what it was measured against may have been held up."""
_DISTURBED = 1.5
"""Two measurements of a gain that are further apart tell of the machine and not of the option."""

Quartiles: TypeAlias = tuple[float, float, float]


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


def gain_of(base: Timed, other: Timed, limit_s: Callable[[], float]) -> tuple[Quartiles, bool]:
    """What ``other`` is worth, and whether the machine was left alone, as far as that shows.

    An implausible gain is measured twice; the measurement that says less counts.
    """
    found = quartiles(compare(base, other, limit_s()))
    if found[1] <= IMPLAUSIBLE:
        return found, True
    again = quartiles(compare(base, other, limit_s()))
    less = min(found, again, key=lambda one: one[1])
    return less, agree(max(found[1], again[1]), less[1])


def agree(more: float, less: float) -> bool:
    """Whether a gain and a later measurement of it do not contradict each other."""
    return more <= IMPLAUSIBLE or more <= _DISTURBED * less


def _is_clear(ratios: Sequence[float]) -> bool:
    low, _, high = quartiles(ratios)
    margin = (high - low) / 2
    return low - margin > WORTH or high + margin < WORTH


def quartiles(values: Sequence[float]) -> Quartiles:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
