"""powersgd: two thin matrices in place of each one, whose product approximates it.

    M_i  rows x columns, of member i          Q  columns x R, the same in all members
    1    P = sum of M_i Q                     whose columns each member makes orthonormal
    2    Q' = sum of M_i^T P                  the next update begins with it as its Q
    mean = P Q'^T                             member i has sent P (M_i^T P)^T

Each update is one step of the power iteration, which begins at the Q' of the last one, so P turns
towards the largest directions of the gradient as training goes on. A matrix that would not become
smaller, and everything that is not a matrix, is sent as it is, with the first sum. At the start Q
is drawn with the number of its parameter as the seed, so all members have the same.

Each member multiplies matrices itself: on processors of the same kind the bits are the same.

Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
for Distributed Optimization", NeurIPS 2019, algorithms 1 and 2. Changed: columns are made
orthonormal by Householder reflections, not by the Gram-Schmidt process, since they yield columns of
length 1 even for a matrix of zeros, from which the next gradient can be found again; the residual
is what the member itself has not sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor

from .base import AllReduce, Compressor, Exchanging, Matrix, Segment


class PowerSgd(Compressor):
    """Sends each matrix as a product of rank ``value``."""

    def __init__(self, segment: Segment, value: int | None = None) -> None:
        super().__init__(segment, value)
        assert value is not None
        self._rank = value
        self._matrices = [
            matrix
            for matrix in segment.matrices
            if value * (matrix.rows + matrix.columns) < matrix.size
        ]
        spans = [(matrix.start, matrix.start + matrix.size) for matrix in self._matrices]
        edges = [0, *chain.from_iterable(spans), segment.size]
        self._rest = list(pairwise(edges))[::2]
        """The (start, stop) of the numbers that are sent as they are."""
        self._q = {matrix.number: self._initial_q(matrix) for matrix in self._matrices}
        self._next_q = self._q

    def _initial_q(self, matrix: Matrix) -> Tensor:
        generator = torch.Generator().manual_seed(matrix.number)
        drawn = torch.randn(matrix.columns, self._rank, generator=generator, dtype=torch.float64)
        return drawn.to(self.segment.device, self.segment.dtype)

    def exchange(self, x: Tensor, out: Tensor) -> Exchanging:
        matrices = self._matrices
        plain = [x[start:stop] for start, stop in self._rest]
        products = [torch.mm(matrix.of(x), self._q[matrix.number]).view(-1) for matrix in matrices]
        first_sum = yield AllReduce(torch.cat([*plain, *products]))
        num_plain = sum(map(len, plain))
        sums = self._cut(first_sum[num_plain:], [matrix.rows for matrix in matrices])
        bases = [torch.linalg.qr(product).Q.contiguous() for product in sums]
        own_factors = [
            torch.mm(matrix.of(x).t(), base) for matrix, base in zip(matrices, bases, strict=True)
        ]
        for matrix, base, factor in zip(matrices, bases, own_factors, strict=True):
            matrix.of(x).addmm_(base, factor.t(), alpha=-1.0)
        for part in plain:
            part.zero_()
        if not matrices:
            out.copy_(first_sum)
            return
        second_sum = yield AllReduce(torch.cat([factor.reshape(-1) for factor in own_factors]))
        factors = list(self._cut(second_sum, [matrix.columns for matrix in matrices]))
        position = 0
        for start, stop in self._rest:
            out[start:stop] = first_sum[position : position + stop - start]
            position += stop - start
        for matrix, base, factor in zip(matrices, bases, factors, strict=True):
            torch.mm(base, factor.t(), out=matrix.of(out))
        self._next_q = {
            matrix.number: factor for matrix, factor in zip(matrices, factors, strict=True)
        }

    def _cut(self, flat: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
        """Cut a flat tensor into matrices with these numbers of rows, and R columns."""
        parts = torch.split(flat, [length * self._rank for length in lengths])
        return (part.view(-1, self._rank) for part in parts)

    def keep(self) -> None:
        self._q = self._next_q

    def _operation_bytes(self) -> Sequence[float]:
        segment, num_members = self.segment, self.segment.num_members
        number_bytes = 2 * (num_members - 1) / num_members * segment.dtype.itemsize
        num_rest = sum(stop - start for start, stop in self._rest)
        sizes = [num_rest + sum(matrix.rows for matrix in self._matrices) * self._rank]
        if self._matrices:
            sizes.append(sum(matrix.columns for matrix in self._matrices) * self._rank)
        return [number_bytes * size for size in sizes]

    def state(self) -> dict[str, Tensor]:
        return {str(number): q for number, q in self._q.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        for number, q in self._q.items():
            saved = state.get(str(number))
            if saved is not None and saved.shape == q.shape:
                self._q[number] = saved.to(q.device, q.dtype)
