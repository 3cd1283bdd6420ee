"""powersgd: in place of each matrix two thin ones, whose product is the nearest that was found.

    M_i  rows x columns, of member i          Q  columns x R, the same in all
    1    P = sum of M_i Q                     orthogonal columns made of it, by each member
    2    Q' = sum of M_i^T P                  the next update begins with it
    mean = P Q'^T                             member i has sent P (M_i^T P)^T

One step of the power iteration an update, and Q' is where the next one begins, so P turns towards
the largest directions of the gradient while training goes on. A matrix that would not become
smaller, and all that is no matrix, goes as it is, with the first sum. At the start Q is drawn from
the number of its parameter, so all members have the same.

All members multiply matrices on their own: on processors of one kind they come to the same bits.

Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
for Distributed Optimization", NeurIPS 2019, algorithms 1 and 2. Orthogonal by Householder's
reflections, not Gram and Schmidt's: of a matrix of zeros, too, they make columns of length 1, from
which the next gradient is found again. The residual is taken from what the member itself has sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .base import AllReduce, Compressor, Exchanging, Matrix, Segment


class PowerSgd(Compressor):
    """Rank ``value``."""

    def __init__(self, segment: Segment, value: int | None = None) -> None:
        super().__init__(segment, value)
        assert value is not None
        self._rank = value
        self._matrices = [
            one for one in segment.matrices if value * (one.rows + one.columns) < one.size
        ]
        ends = [0, *(at for one in self._matrices for at in (one.start, one.start + one.size))]
        self._rest = list(pairwise([*ends, segment.size]))[::2]
        """From and up to which numbers are sent as they are."""
        self._q = {one.number: self._start_of(one) for one in self._matrices}
        self._next_q = self._q

    def _start_of(self, matrix: Matrix) -> Tensor:
        generator = torch.Generator().manual_seed(matrix.number)
        drawn = torch.randn(matrix.columns, self._rank, generator=generator, dtype=torch.float64)
        return drawn.to(self.segment.device, self.segment.dtype)

    def exchange(self, x: Tensor, out: Tensor) -> Exchanging:
        matrices = self._matrices
        rest = [x[start:stop] for start, stop in self._rest]
        products = [torch.mm(one.of(x), self._q[one.number]).view(-1) for one in matrices]
        first = yield AllReduce(torch.cat([*rest, *products]))
        num_rest = sum(map(len, rest))
        sums = self._cut(first[num_rest:], [one.rows for one in matrices])
        bases = [torch.linalg.qr(one).Q.contiguous() for one in sums]
        own = [torch.mm(one.of(x).t(), base) for one, base in zip(matrices, bases, strict=True)]
        for matrix, base, thin in zip(matrices, bases, own, strict=True):
            matrix.of(x).addmm_(base, thin.t(), alpha=-1.0)
        for one in rest:
            one.zero_()
        if not matrices:
            out.copy_(first)
            return
        second = yield AllReduce(torch.cat([one.reshape(-1) for one in own]))
        thins = list(self._cut(second, [one.columns for one in matrices]))
        at = 0
        for start, stop in self._rest:
            out[start:stop] = first[at : at + stop - start]
            at += stop - start
        for matrix, base, thin in zip(matrices, bases, thins, strict=True):
            torch.mm(base, thin.t(), out=matrix.of(out))
        self._next_q = {one.number: thin for one, thin in zip(matrices, thins, strict=True)}

    def _cut(self, flat: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
        """Matrices of so many rows, and the rank's columns."""
        parts = torch.split(flat, [one * self._rank for one in lengths])
        return (part.view(-1, self._rank) for part in parts)

    def keep(self) -> None:
        self._q = self._next_q

    def _operation_bytes(self) -> Sequence[float]:
        segment, num_members = self.segment, self.segment.num_members
        each = 2 * (num_members - 1) / num_members * segment.dtype.itemsize
        num_rest = sum(stop - start for start, stop in self._rest)
        first = num_rest + sum(one.rows for one in self._matrices) * self._rank
        second = sum(one.columns for one in self._matrices) * self._rank
        return [each * first, each * second] if self._matrices else [each * first]

    def state(self) -> dict[str, Tensor]:
        return {str(number): q for number, q in self._q.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        for number, q in self._q.items():
            saved = state.get(str(number))
            if saved is not None and saved.shape == q.shape:
                self._q[number] = saved.to(q.device, q.dtype)
