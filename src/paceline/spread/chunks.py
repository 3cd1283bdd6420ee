"""Micro-batches of all workers, and what crosses the borders between parts, for any rows of one.

    worker 0   mini-batch of 7 rows, 3 micro-batches of a third   ->  3 2 2
    worker 1   mini-batch of 2 rows                               ->  1 1
    in turns   0.0 (3)  1.0 (1)  0.1 (2)  1.1 (1)  0.2 (2)      where outputs go back to each
    else       0.0 (3)  0.1 (2)  0.2 (2)  1.0 (1)  1.1 (1)      one worker's behind another's

This module must not know what is computed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDING = 1e-9


class TensorShape(NamedTuple):
    """What crosses a border, for any number of rows of a micro-batch.

    Attributes:
        fixed, growing: each dimension is ``fixed + growing * rows``.
    """

    dtype: torch.dtype
    fixed: tuple[int, ...]
    growing: tuple[int, ...]

    def empty(self, rows: int) -> Tensor:
        """Room for one."""
        return torch.empty(self._size(rows), dtype=self.dtype)

    def length(self, rows: int) -> int:
        """Of its first dimension, which may be several to a row: (rows * words, classes)."""
        return self.fixed[0] + self.growing[0] * rows

    def is_of(self, tensor: Tensor, rows: int) -> bool:
        """Whether this is one, of so many rows."""
        return tensor.dtype is self.dtype and list(tensor.shape) == self._size(rows)

    def other_size(self, tensor: Tensor) -> int | None:
        """The first dimension of a row that is another."""
        pairs = enumerate(zip(tensor.shape, self.fixed, strict=True))
        return next((at for at, (one, wanted) in pairs if at and one != wanted), None)

    def num_bytes(self, rows: int) -> int:
        return math.prod(self._size(rows)) * self.dtype.itemsize

    def _size(self, rows: int) -> list[int]:
        return [a + b * rows for a, b in zip(self.fixed, self.growing, strict=True)]

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


class Chunk(NamedTuple):
    """A micro-batch: whose it is, which of theirs, and its rows."""

    owner: int
    number: int
    rows: int


def chunk_rows(rows: int, shares: Sequence[float]) -> list[int]:
    """The rows of each micro-batch: as near to its share as can be, and at least one.

    Example:
        >>> chunk_rows(7, (1 / 3, 1 / 3, 1 / 3)), chunk_rows(128, (0.25, 0.75))
        ([3, 2, 2], [32, 96])
    """
    if rows < len(shares):
        return [1] * rows
    found = [max(1, math.floor(rows * one + _ROUNDING)) for one in shares]
    left = [rows * one - got for one, got in zip(shares, found, strict=True)]
    for at in sorted(range(len(found)), key=lambda i: -left[i])[: max(0, rows - sum(found))]:
        found[at] += 1
    while sum(found) > rows:  # some had less than one
        found[found.index(max(found))] -= 1
    return found


def chunks_of(
    rows: Sequence[int], shares: Sequence[Sequence[float]], *, in_turns: bool
) -> list[Chunk]:
    """The micro-batches of all workers, in the order in which they are computed.

    Args:
        rows: of each worker's mini-batch.
        shares: of each worker's mini-batch, what each of its micro-batches is.
        in_turns: a worker's next one follows one of each other's.
    """
    own = [chunk_rows(*one) for one in zip(rows, shares, strict=True)]
    found = [
        Chunk(owner, number, size)
        for owner, sizes in enumerate(own)
        for number, size in enumerate(sizes)
    ]
    return sorted(found, key=lambda one: one.number) if in_turns else found


Values = Mapping[int, Sequence[Tensor]]
"""Of a worker's own chunks, by their index."""
