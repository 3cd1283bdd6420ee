"""Cut the mini-batches of all workers into micro-batches, and size what crosses borders for them.

    worker 0   mini-batch of 7 rows, 3 micro-batches of a third   ->  3 2 2
    worker 1   mini-batch of 2 rows                               ->  1 1
    in turns   0.0 (3)  1.0 (1)  0.1 (2)  1.1 (1)  0.2 (2)      where outputs go back to each worker
    otherwise  0.0 (3)  0.1 (2)  0.2 (2)  1.0 (1)  1.1 (1)      one worker's after another's

This module must not know what is computed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDING = 1e-9


class TensorShape(NamedTuple):
    """The type and shape of a tensor that crosses a border, for any number of rows.

    Attributes:
        fixed, growing: each dimension is ``fixed + growing * rows``, for rows of a micro-batch.
    """

    dtype: torch.dtype
    fixed: tuple[int, ...]
    growing: tuple[int, ...]

    def empty(self, rows: int) -> Tensor:
        """Return an uninitialized tensor for a number of rows."""
        return torch.empty(self._size(rows), dtype=self.dtype)

    def length(self, rows: int) -> int:
        """Return the first dimension, which may be several per row: (rows * words, classes)."""
        return self.fixed[0] + self.growing[0] * rows

    def is_of(self, tensor: Tensor, rows: int) -> bool:
        """Whether a tensor has this type and shape, for a number of rows."""
        return tensor.dtype is self.dtype and list(tensor.shape) == self._size(rows)

    def other_size(self, tensor: Tensor) -> int | None:
        """Return the first dimension, but for rows, in which a tensor has another size; or None."""
        pairs = enumerate(zip(tensor.shape, self.fixed, strict=True))
        return next((dim for dim, (size, wanted) in pairs if dim and size != wanted), None)

    def num_bytes(self, rows: int) -> int:
        return math.prod(self._size(rows)) * self.dtype.itemsize

    def _size(self, rows: int) -> list[int]:
        return [a + b * rows for a, b in zip(self.fixed, self.growing, strict=True)]

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


class Chunk(NamedTuple):
    """A micro-batch: the worker that owns it, its number among that worker's, and its rows."""

    owner: int
    number: int
    rows: int


def chunk_rows(rows: int, shares: Sequence[float]) -> list[int]:
    """Divide rows over micro-batches, as close to their shares as possible, and at least one each.

    Example:
        >>> chunk_rows(7, (1 / 3, 1 / 3, 1 / 3)), chunk_rows(128, (0.25, 0.75))
        ([3, 2, 2], [32, 96])
    """
    if rows < len(shares):
        return [1] * rows
    sizes = [max(1, math.floor(rows * share + _ROUNDING)) for share in shares]
    lacking = [rows * share - size for share, size in zip(shares, sizes, strict=True)]
    for at in sorted(range(len(sizes)), key=lambda i: -lacking[i])[: max(0, rows - sum(sizes))]:
        sizes[at] += 1
    while sum(sizes) > rows:  # some shares were less than one row
        sizes[sizes.index(max(sizes))] -= 1
    return sizes


def chunks_of(
    rows: Sequence[int], shares: Sequence[Sequence[float]], *, in_turns: bool
) -> list[Chunk]:
    """Return the micro-batches of all workers, in the order in which they are computed.

    Args:
        rows: rows of each worker's mini-batch.
        shares: for each worker, the share of its mini-batch that each of its micro-batches is.
        in_turns: whether workers take turns; otherwise one worker's all come before the next's.
    """
    worker_sizes = [chunk_rows(*mini_batch) for mini_batch in zip(rows, shares, strict=True)]
    chunks = [
        Chunk(owner, number, size)
        for owner, sizes in enumerate(worker_sizes)
        for number, size in enumerate(sizes)
    ]
    return sorted(chunks, key=lambda chunk: chunk.number) if in_turns else chunks


Values = Mapping[int, Sequence[Tensor]]
"""Tensors of each of a worker's own chunks, by the chunk's number."""
