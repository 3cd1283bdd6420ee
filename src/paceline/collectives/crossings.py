"""Where one collective takes over from another: in measured times, and in predicted ones.

    log seconds
      |  tree .              .   ring        measured at a few sizes: the crossing lies where the
      |         `-.      .-'                 straight lines between them meet, both axes
      |  ring ----- `x.-' ----               logarithmic
      |            .-'  `- tree
      +-------------|--------- log bytes

Two cross where each is clearly the faster one at one end of the sizes: in every block, since two
that send the same messages differ by chance alone, and of many pairs some by a lot. This module
must not know how times came about.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import NamedTuple

_CLEAR = 1.1
"""So much faster at an end of the sizes is worth a word."""
_BEYOND, _STEP = 16.0, 2.0**0.25
"""How far beyond the measured sizes a predicted crossing is looked for, and how finely."""
_NEAR = 2.0

Seconds = Callable[[str, int], float]
Blocks = Mapping[str, Mapping[int, Sequence[float]]]
"""By collective and bytes, the same sizes for all: seconds of blocks that took turns."""


class Crossing(NamedTuple):
    """From this size on ``above`` is faster than ``below``.

    Attributes:
        predicted_bytes: None: by the prediction the two do not cross anywhere near.
    """

    below: str
    above: str
    measured_bytes: float
    predicted_bytes: float | None

    @property
    def is_near(self) -> bool:
        """Whether it was predicted within a factor of 2."""
        if self.predicted_bytes is None:
            return False
        return 1 / _NEAR <= self.predicted_bytes / self.measured_bytes <= _NEAR


def find_crossings(blocks: Blocks, predicted: Seconds) -> Iterator[Crossing]:
    """All that are clear in measured times, each beside its prediction.

    Args:
        predicted: seconds of a collective at a size.
    """
    for below, above in permutations(blocks, 2):
        sizes = sorted(blocks[below])
        pairs = [(blocks[below][size], blocks[above][size]) for size in sizes]
        if not (_is_clear(*pairs[0]) and _is_clear(*reversed(pairs[-1]))):
            continue
        ratios = [statistics.median(one) / statistics.median(other) for one, other in pairs]
        wide = grid(sizes[0] / _BEYOND, sizes[-1] * _BEYOND)
        found = [predicted(below, size) / predicted(above, size) for size in wide]
        measured_bytes = _where(sizes, ratios)
        assert measured_bytes is not None  # it begins below 1 and ends above
        yield Crossing(
            below=below,
            above=above,
            measured_bytes=measured_bytes,
            predicted_bytes=_where(wide, found),
        )


def _is_clear(fast: Sequence[float], slow: Sequence[float]) -> bool:
    """Whether one is faster than the other, beyond chance."""
    is_far = statistics.median(slow) >= _CLEAR * statistics.median(fast)
    return is_far and all(one < other for one, other in zip(fast, slow, strict=True))


def grid(least: float, most: float) -> list[int]:
    """Sizes in even steps of their logarithm, multiples of 4 B."""
    count = math.floor(math.log(most / least) / math.log(_STEP) + 1e-9) + 1
    return sorted({max(4, round(least * _STEP**i / 4) * 4) for i in range(count)})


def _where(sizes: Sequence[int], ratios: Sequence[float]) -> float | None:
    """The size at which the ratio comes to 1 from below; of several the one in the middle."""
    found = []
    for (low, before), (high, after) in pairwise(zip(sizes, ratios, strict=True)):
        if before < 1.0 <= after:
            share = -math.log(before) / (math.log(after) - math.log(before))
            found.append(low * (high / low) ** share)
    return found[len(found) // 2] if found else None
