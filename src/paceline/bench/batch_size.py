"""The largest batch that fits: doubled until memory ends, then halved in between.

    fits     1 2 4 8 16 32          48 56
    does not               64           60        -> 56, when 60 is within 5 % of it

Every batch that is said to fit has been trained with, and the one above it was tried and did not.
This module must not know what a batch is made of.
"""

from collections.abc import Callable
from dataclasses import dataclass

TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """What was found.

    Args:
        fits: the largest batch that was trained with; 0: not even one sample.
        ends: the smallest one that was tried and did not fit; None: the search's end was reached.
        tried: all, in the order tried.
    """

    fits: int
    ends: int | None
    tried: tuple[int, ...]


def largest_batch(does_fit: Callable[[int], bool], most: int) -> Largest:
    """Find it by trying.

    Args:
        does_fit: trains with so many samples and says whether memory sufficed.
        most: where to stop, >= 1.

    Example:
        >>> found = largest_batch(lambda batch: batch <= 1000, most=100_000)
        >>> found.fits <= 1000 < found.ends <= 1.05 * found.fits + 1
        True
    """
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return does_fit(batch)

    low, high = 0, None
    batch = 1
    while high is None and low < most:
        batch = min(batch, most)
        if fits(batch):
            low, batch = batch, 2 * batch
        else:
            high = batch
    while high is not None and high - low > max(1, TOLERANCE * low):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return Largest(fits=low, ends=high, tried=tuple(tried))
