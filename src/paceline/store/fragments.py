"""Which parameters an update is of, where it is of a fragment: whole ones, side by side.

    layout       | w0 | w1 |   w2   | w3 | w4 | w5 |      by bytes as even as whole ones can be:
    fragments    |    0    |    1   |      2       |      the largest is as small as there is one

Each is one stretch of bytes for each type of numbers, so it is sent, summed and copied as it lies.
This module must not know protocols, nor which update is whose.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..errors import ConfigError
from .layout import Section


class Fragment(NamedTuple):
    """Parameters ``[first, last)``, which lie in the bytes ``[start, stop)``.

    Attributes:
        present: per parameter of the model, 1 where it is of this fragment.
    """

    first: int
    last: int
    start: int
    stop: int
    present: bytes

    def runs(self, section: Section) -> Iterator[tuple[torch.dtype, int, int]]:
        """Its stretches of one dtype, ``(dtype, start, stop)`` in bytes, padding included."""
        for dtype, start, stop in section.runs():
            first, last = max(start, self.start), min(stop, self.stop)
            if first < last:
                yield dtype, first, last


class Fragments:
    """The fragments of one model.

    Args:
        section: its parameters.

    Attributes:
        each: in the order in which they are exchanged.
        whole: all parameters.

    Raises:
        ConfigError: there are more fragments than parameters.
    """

    def __init__(self, section: Section, num_fragments: int) -> None:
        places, count = section.places, len(section.places)
        if num_fragments > count:
            raise ConfigError(
                f"{num_fragments} fragments are of whole parameters, and the model has {count}; "
                "use --fragments F, at most as many, of which the local steps are a multiple"
            )
        self.whole = Fragment(0, count, section.start, section.stop, b"\1" * count)
        firsts = cut([one.num_bytes for one in places], num_fragments)
        lasts = [*firsts[1:], count]
        self.each = [
            Fragment(
                first, last, places[first].offset,
                section.stop if last == count else places[last].offset,
                bytes(first <= one < last for one in range(count)),
            )
            for first, last in zip(firsts, lasts, strict=True)
        ]  # fmt: skip
        self.largest_bytes = max(one.stop - one.start for one in self.each)

    def of(self, version: int, *, is_last: bool = False) -> Fragment:
        """What is exchanged by the update that is made on ``version``."""
        return self.whole if is_last else self.each[version % len(self.each)]

    def between(self, first: int, last: int) -> Sequence[Fragment]:
        """What updates on versions ``first`` to ``last`` - 1 were of, if none was of all."""
        return [self.of(version) for version in range(first, min(last, first + len(self.each)))]


def cut(sizes: Sequence[int], count: int) -> list[int]:
    """Where each of ``count`` stretches of these begins; the largest is as small as can be.

    Example:
        >>> cut([1, 1, 1, 9, 2, 2], 3)
        [0, 3, 4]
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, middle, 1)) <= count:
            high = middle
        else:
            low = middle + 1
    return _fill(sizes, low, count)


def _fill(sizes: Sequence[int], bound: int, least: int) -> list[int]:
    """Where stretches of at most ``bound`` begin, at least so many of them."""
    firsts, total = [0], sizes[0]
    for number, size in enumerate(sizes[1:], start=1):
        is_owed = len(sizes) - number <= least - len(firsts)  # one for each stretch to come
        if total + size > bound or is_owed:
            firsts.append(number)
            total = 0
        total += size
    return firsts
