"""topk: the largest numbers of a gradient and their indices; all others wait.

    x          0.1  -3.0   0.2   0.0   2.5  -0.4
    sent             -3.0              2.5           indices 1, 4 and these numbers, by each member
    residual   0.1         0.2   0.0        -0.4     grows until it is among the largest

Members send different indices, so nothing is added up on the way: each receives what all have sent,
and adds it up in the order of seats. Without the residual this does not converge, since a number
that is never among the largest of any member is never learned
(tests/compression/test_convergence.py).

Source: A. F. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017
(send the largest, let the rest wait); S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with
Memory", NeurIPS 2018 (why it converges).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import MILLION
from .base import AllGather, Compressor, Exchanging, Segment, joined

_INDEX_BYTES = 4


class TopK(Compressor):
    """Sends the numbers with the largest magnitudes: a given share of all, at least one."""

    def __init__(self, segment: Segment, value: int | None = None) -> None:
        super().__init__(segment, value)
        assert value is not None
        assert segment.size < 2**31, "an index has 4 bytes"
        self.num_sent = min(segment.size, max(1, math.ceil(value * segment.size / MILLION)))

    def exchange(self, x: Tensor, out: Tensor) -> Exchanging:
        indices = torch.topk(x.abs(), self.num_sent, sorted=False).indices
        values = x[indices]
        x[indices] = 0.0
        gathered = yield AllGather(joined([indices.int(), values]))
        index_bytes = self.num_sent * _INDEX_BYTES
        out.zero_()
        for sent in gathered:
            indices = sent[:index_bytes].view(torch.int32)
            out.index_add_(0, indices, sent[index_bytes:].clone().view(out.dtype))

    def _operation_bytes(self) -> Sequence[float]:
        number_bytes = _INDEX_BYTES + self.segment.dtype.itemsize
        return [(self.segment.num_members - 1) * self.num_sent * number_bytes]
