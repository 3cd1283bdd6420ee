"""The sizes at which one collective overtakes another, by measured and by predicted times.

    log seconds
      |  tree .              .   ring        measured at a few sizes: the crossing lies where the
      |         `-.      .-'                 straight lines between them meet, both axes
      |  ring ----- `x.-' ----               logarithmic
      |            .-'  `- tree
      +-------------|--------- log bytes

Two collectives cross if each is clearly faster than the other at one end of the sizes, and in every
block: two that send the same messages differ by chance alone, and among many pairs some differ by a
lot. This module must not know how the times were obtained.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import NamedTuple

_CLEAR = 1.1
"""How many times faster a collective has to be at its end of the sizes."""
_BEYOND, _STEP = 16.0, 2.0**0.25
"""How far beyond the measured sizes a predicted crossing is searched for, and in which steps."""
_NEAR = 2.0
"""A predicted crossing within this factor of the measured one is near."""

Seconds = Callable[[str, int], float]
Blocks = Mapping[str, Mapping[int, Sequence[float]]]
"""Seconds of each block, by collective and size in bytes. All have the same sizes, and took turns
block by block."""


class Crossing(NamedTuple):
    """The size from which ``above`` is faster than ``below``.

    Attributes:
        predicted_bytes: None if the prediction has no crossing near the measured sizes.
    """

    below: str
    above: str
    measured_bytes: float
    predicted_bytes: float | None

    @property
    def is_near(self) -> bool:
        """Whether the prediction is within a factor of 2 of the measurement."""
        if self.predicted_bytes is None:
            return False
        return 1 / _NEAR <= self.predicted_bytes / self.measured_bytes <= _NEAR


def find_crossings(blocks: Blocks, predicted: Seconds) -> Iterator[Crossing]:
    """Yield the crossings that are clear in the measured times, each with its prediction.

    Args:
        blocks: the measured times.
        predicted: seconds of a collective at a size.
    """
    for below, above in permutations(blocks, 2):
        sizes = sorted(blocks[below])
        block_pairs = [(blocks[below][size], blocks[above][size]) for size in sizes]
        if not (_is_clear(*block_pairs[0]) and _is_clear(*reversed(block_pairs[-1]))):
            continue
        measured_ratios = [
            statistics.median(below_s) / statistics.median(above_s)
            for below_s, above_s in block_pairs
        ]
        wide_sizes = grid(sizes[0] / _BEYOND, sizes[-1] * _BEYOND)
        predicted_ratios = [predicted(below, size) / predicted(above, size) for size in wide_sizes]
        measured_bytes = _where(sizes, measured_ratios)
        assert measured_bytes is not None  # the ratio begins below 1 and ends above
        yield Crossing(
            below=below,
            above=above,
            measured_bytes=measured_bytes,
            predicted_bytes=_where(wide_sizes, predicted_ratios),
        )


def _is_clear(fast: Sequence[float], slow: Sequence[float]) -> bool:
    """Whether ``fast`` is faster than ``slow`` in every block, and clearly so in the median."""
    is_far = statistics.median(slow) >= _CLEAR * statistics.median(fast)
    return is_far and all(fast_s < slow_s for fast_s, slow_s in zip(fast, slow, strict=True))


def grid(least: float, most: float) -> list[int]:
    """Return sizes in bytes from ``least`` to ``most`` in logarithmic steps, multiples of 4."""
    count = math.floor(math.log(most / least) / math.log(_STEP) + 1e-9) + 1
    return sorted({max(4, round(least * _STEP**i / 4) * 4) for i in range(count)})


def _where(sizes: Sequence[int], ratios: Sequence[float]) -> float | None:
    """The size at which the ratio rises to 1; the middle one of several, None if there is none."""
    crossings = []
    for (low, before), (high, after) in pairwise(zip(sizes, ratios, strict=True)):
        if before < 1.0 <= after:
            share = -math.log(before) / (math.log(after) - math.log(before))
            crossings.append(low * (high / low) ** share)
    return crossings[len(crossings) // 2] if crossings else None
