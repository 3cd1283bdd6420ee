"""Whether workers hold the same data: a comparison of a few samples' digests.

A sample that differs when it is fetched again has random numbers of its own, and is not compared.
One that is flipped in half of all cases may come out alike a few times in one worker, and flipped
as often in another: ``are_others`` weighs that. This module must not know what a sample is, nor
torch: who compares is the launcher.
"""

from collections.abc import Sequence
from typing import NamedTuple

_LEAST_BITS = 14
"""Different samples are other data where chance does that less than once in 16,000 runs."""


class Likeness(NamedTuple):
    """A sample: its number, a digest of it, and how often it came out so; 0: not to be compared."""

    number: int
    digest: str
    times: int


def are_others(mine: Sequence[Likeness], theirs: Sequence[Likeness]) -> int | None:
    """The number of a sample that shows that data differ; None: none does.

    A sample with two outcomes of its own choice is k times the one here, and k times the other
    there, with a probability of at most 2 / 4^k.
    """
    differing = [
        (one.number, 2 * min(one.times, other.times) - 1)
        for one, other in zip(mine, theirs, strict=False)
        if one.times and other.times and one.digest != other.digest
    ]
    return differing[0][0] if sum(bits for _, bits in differing) >= _LEAST_BITS else None
