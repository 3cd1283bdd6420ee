"""Gradients in buckets: what of the mean over ranks is summed at once, and lines along with it.

    layout     | layer 1 | layer 2 | layer 3 |
    buckets    |   bucket 1   | bucket 0     |     the last layers' gradients are there first

    room   | lines of rank 0 | of rank 1 | ... | bucket 1 | rest of the mean
             `---------------- one sum ---------------'      one collective a round less

A byte of a line is a number from 0 to 255, of the bucket's own type, in this rank's place, and zero
in all others': the sum over ranks is the byte, exactly, in every floating-point type that gradients
have.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB
2020, sections 3.2 and 4.2 (buckets, their order and sizes). This module must not know who sums, nor
what a line says.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...exchange import BUCKET_BYTES, CPU_BUCKET_BYTES, FIRST_BUCKET_BYTES
from ...exchange.compressed import Span
from ...store.layout import ALIGN_BYTES, Section

_MOST_BYTES = 1 << 16
"""Lines that are more, as numbers, go by themselves."""


class Bucket(NamedTuple):
    """A part of the gradients, whose sum is begun at once.

    Attributes:
        numbers: of the parameters in it.
    """

    span: Span
    numbers: tuple[int, ...]

    def multiply(self, parameters: Sequence[Tensor], views: Sequence[Tensor], share: float) -> None:
        """All its gradients times ``share`` into their views, in a few calls; missing ones: 0."""
        present = [number for number in self.numbers if parameters[number].grad is not None]
        if len(present) < len(self.numbers):
            torch._foreach_zero_([views[number] for number in self.numbers])
        if present:
            places = [views[number] for number in present]
            torch._foreach_copy_(places, [_dense(parameters[number]) for number in present])
            torch._foreach_mul_(places, share)


def _dense(parameter: Tensor) -> Tensor:
    """Its gradient; sparse ones were refused when it was marked as there."""
    assert parameter.grad is not None
    return parameter.grad.detach()


def make_buckets(section: Section, device: torch.device) -> list[Bucket]:
    """The gradients in buckets, the last parameters' first: theirs are there first.

    Args:
        device: where they lie, which says what is between them.
    """
    most_bytes = CPU_BUCKET_BYTES if device.type == "cpu" else BUCKET_BYTES
    buckets: list[Bucket] = []
    numbered = list(enumerate(section.places))
    for dtype, start, stop in reversed(list(section.runs())):
        inside = [(n, one) for n, one in numbered if start <= one.offset < stop]
        end, numbers = stop, list[int]()
        for number, place in reversed(inside):
            numbers.append(number)
            most = most_bytes if buckets else FIRST_BUCKET_BYTES
            if end - place.offset >= most or place.offset == start:
                buckets.append(Bucket(Span(place.offset, end, dtype), tuple(numbers)))
                end, numbers = place.offset, []
    return buckets


class LinesAlong:
    """A mean of gradients, with room for the lines of all ranks before its first bucket.

    Args:
        num_bytes: of all lines.
        bucket: that they go with, at the beginning of the mean.
        mean_bytes: of the whole mean.

    Attributes:
        mean: bytes, ``(mean_bytes,)``, zero at first.
        whole: lines and bucket in one, ``(n,)``, of the bucket's type.
    """

    def __init__(self, num_bytes: int, bucket: Span, mean_bytes: int) -> None:
        size = num_bytes * bucket.dtype.itemsize
        start = -(-size // ALIGN_BYTES) * ALIGN_BYTES
        room = torch.zeros(start + mean_bytes, dtype=torch.uint8)
        self.mean = room[start:]
        self.whole = room[start - size : start + bucket.stop].view(bucket.dtype)
        self._lines = self.whole[:num_bytes]

    @staticmethod
    def fits(num_bytes: int, bucket: Span) -> bool:
        """Whether so many go with this bucket."""
        is_float = bucket.dtype.is_floating_point and not bucket.start
        return is_float and num_bytes * bucket.dtype.itemsize <= _MOST_BYTES

    def put(self, seat: int, line: Tensor) -> None:
        """This rank's line, bytes, before the sum."""
        self._lines.zero_()
        self._lines[seat * len(line) : (seat + 1) * len(line)] = line

    def read(self, lines: Tensor) -> None:
        """The bytes of all lines, after it."""
        lines.copy_(self._lines)
