"""Divide the parameters into fragments: updates of one fragment cover whole, adjacent parameters.

    layout       | w0 | w1 |   w2   | w3 | w4 | w5 |      bytes as even as whole parameters allow:
    fragments    |    0    |    1   |      2       |      the largest is as small as possible

Each is one contiguous range of bytes per dtype, so it is sent, summed and copied without a gather.
This module must not know protocols, nor which update belongs to whom.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..errors import ConfigError
from .layout import Section


class Fragment(NamedTuple):
    """Parameters ``[first, last)``, in the bytes ``[start, stop)``.

    Attributes:
        present: per parameter of the model, 1 if it belongs to this fragment.
    """

    first: int
    last: int
    start: int
    stop: int
    present: bytes

    def runs(self, section: Section) -> Iterator[tuple[torch.dtype, int, int]]:
        """Its ranges of one dtype, ``(dtype, start, stop)`` in bytes, with padding."""
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
                f"{num_fragments} fragments need as many parameters, but the model has {count}; "
                "use --fragments F with a smaller F that divides the local steps"
            )
        self.whole = Fragment(0, count, section.start, section.stop, b"\1" * count)
        firsts = cut([place.num_bytes for place in places], num_fragments)
        lasts = [*firsts[1:], count]
        self.each = [
            Fragment(
                first, last, places[first].offset,
                section.stop if last == count else places[last].offset,
                bytes(first <= number < last for number in range(count)),
            )
            for first, last in zip(firsts, lasts, strict=True)
        ]  # fmt: skip
        self.largest_bytes = max(fragment.stop - fragment.start for fragment in self.each)

    def of(self, version: int, *, is_last: bool = False) -> Fragment:
        """The fragment that is exchanged by the update of ``version``."""
        return self.whole if is_last else self.each[version % len(self.each)]

    def between(self, first: int, last: int) -> Sequence[Fragment]:
        """The fragments of updates on versions ``first`` to ``last`` - 1, if none was whole."""
        return [self.of(version) for version in range(first, min(last, first + len(self.each)))]


def cut(sizes: Sequence[int], count: int) -> list[int]:
    """Divide ``sizes`` into ``count`` ranges, the largest as small as possible; returns starts.

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
    """The starts of at least ``least`` ranges, each of a size of at most ``bound``."""
    firsts, total = [0], sizes[0]
    for number, size in enumerate(sizes[1:], start=1):
        is_needed = len(sizes) - number <= least - len(firsts)  # one item for each later range
        if total + size > bound or is_needed:
            firsts.append(number)
            total = 0
        total += size
    return firsts
