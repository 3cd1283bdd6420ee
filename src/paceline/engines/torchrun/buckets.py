"""Gradients in buckets, each summed over ranks at once; one may carry the ranks' lines.

    layout     | layer 1 | layer 2 | layer 3 |
    buckets    |   bucket 1   | bucket 0     |     the last layers' gradients are ready first

    room   | lines of rank 0 | of rank 1 | ... | bucket 1 | rest of the mean
             `---------------- one sum ---------------'      saves one collective a round

Each byte of a line is a number from 0 to 255 of the bucket's dtype, in its rank's place, and zero
in the buffers of all other ranks: the sum over ranks is exactly that byte, in every floating-point
dtype that gradients have.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB
2020, sections 3.2 and 4.2 (buckets, their order and sizes). This module must not know who sums, nor
what a line contains.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...exchange import BUCKET_BYTES, CPU_BUCKET_BYTES, FIRST_BUCKET_BYTES
from ...exchange.compressed import Span
from ...store.layout import ALIGN_BYTES, Section

_MAX_LINES_BYTES = 1 << 16
"""Longer lines, encoded as numbers, are gathered separately."""


class Bucket(NamedTuple):
    """A part of the gradients that is summed in one collective.

    Attributes:
        numbers: the numbers of its parameters.
    """

    span: Span
    numbers: tuple[int, ...]

    def multiply(self, parameters: Sequence[Tensor], views: Sequence[Tensor], share: float) -> None:
        """Write each gradient times ``share`` to its view, in a few calls; 0 for missing ones."""
        present = [number for number in self.numbers if parameters[number].grad is not None]
        if len(present) < len(self.numbers):
            torch._foreach_zero_([views[number] for number in self.numbers])
        if present:
            places = [views[number] for number in present]
            torch._foreach_copy_(places, [_dense(parameters[number]) for number in present])
            torch._foreach_mul_(places, share)


def _dense(parameter: Tensor) -> Tensor:
    """Return the parameter's gradient; sparse ones were refused when it arrived."""
    assert parameter.grad is not None
    return parameter.grad.detach()


def make_buckets(section: Section, device: torch.device) -> list[Bucket]:
    """Divide the gradients into buckets, the last parameters first, as a backward pass does.

    Args:
        device: of the gradients; it decides the size of the buckets.
    """
    later_bytes = CPU_BUCKET_BYTES if device.type == "cpu" else BUCKET_BYTES
    buckets: list[Bucket] = []
    numbered = list(enumerate(section.places))
    for dtype, start, stop in reversed(list(section.runs())):
        inside = [(n, place) for n, place in numbered if start <= place.offset < stop]
        end, numbers = stop, list[int]()
        for number, place in reversed(inside):
            numbers.append(number)
            num_bytes = later_bytes if buckets else FIRST_BUCKET_BYTES
            if end - place.offset >= num_bytes or place.offset == start:
                buckets.append(Bucket(Span(place.offset, end, dtype), tuple(numbers)))
                end, numbers = place.offset, []
    return buckets


class LinesAlong:
    """A mean of gradients, with room for the lines of all ranks before its first bucket.

    Args:
        num_bytes: the size of all lines.
        bucket: the bucket that carries them, at the beginning of the mean.
        mean_bytes: the size of the whole mean.
        zeros: returns memory of so many bytes.

    Attributes:
        mean: bytes, ``(mean_bytes,)``, zero at first.
        whole: lines and bucket in one, ``(n,)``, of the bucket's dtype.
    """

    def __init__(
        self, num_bytes: int, bucket: Span, mean_bytes: int, zeros: Callable[[int], Tensor]
    ) -> None:
        size = num_bytes * bucket.dtype.itemsize
        start = -(-size // ALIGN_BYTES) * ALIGN_BYTES
        room = zeros(start + mean_bytes)
        self.mean = room[start:]
        self.whole = room[start - size : start + bucket.stop].view(bucket.dtype)
        self._lines = self.whole[:num_bytes]

    @staticmethod
    def fits(num_bytes: int, bucket: Span) -> bool:
        """Return whether this bucket can carry lines of this size."""
        is_float = bucket.dtype.is_floating_point and not bucket.start
        return is_float and num_bytes * bucket.dtype.itemsize <= _MAX_LINES_BYTES

    def put(self, seat: int, line: Tensor) -> None:
        """Write this rank's line, in bytes, before the sum."""
        self._lines.zero_()
        self._lines[seat * len(line) : (seat + 1) * len(line)] = line

    def read(self, lines: Tensor) -> None:
        """Copy the bytes of all lines to ``lines``, after the sum."""
        lines.copy_(self._lines)
