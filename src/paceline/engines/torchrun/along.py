"""Lines that go with a bucket of gradients: one collective a round less.

    room   | lines of rank 0 | of rank 1 | ... | bucket | rest of the mean
             `---------------- one sum -------------'

A byte of a line is a number from 0 to 255, of the bucket's own type, in this rank's place, and zero
in all others': the sum over ranks is the byte, exactly, in every floating-point type that gradients
have. This module must not know what a line says.
"""

import torch
from torch import Tensor

from ...exchange.compressed import Span
from ...store.layout import ALIGN_BYTES

_MOST_BYTES = 1 << 16
"""Lines that are more, as numbers, go by themselves."""


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
