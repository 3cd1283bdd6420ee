"""topk: the largest numbers of a gradient, and where they stand; all others wait.

    x          0.1  -3.0   0.2   0.0   2.5  -0.4
    sent             -3.0              2.5           places 1, 4 and these numbers, from each member
    residual   0.1         0.2   0.0        -0.4     grows until it is among the largest

Members send unlike places, so nothing is added up on the way: each gets what all have sent, and
adds it up in the order of seats. Without the residual this does not converge: a number that is
never the largest in any member is never learned (tests/compression/test_convergence.py).

Source: A. F. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017
(the largest, the rest waits); S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with
Memory", NeurIPS 2018 (it converges).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import MILLION
from .base import AllGather, Compressor, Exchanging, Segment, joined

_PLACE_BYTES = 4


class TopK(Compressor):
    """A share of the numbers, at least one."""

    def __init__(self, segment: Segment, value: int | None = None) -> None:
        super().__init__(segment, value)
        assert value is not None
        assert segment.size < 2**31, "a place has 4 bytes"
        self.num_sent = min(segment.size, max(1, math.ceil(value * segment.size / MILLION)))

    def exchange(self, x: Tensor, out: Tensor) -> Exchanging:
        places = torch.topk(x.abs(), self.num_sent, sorted=False).indices
        values = x[places]
        x[places] = 0.0
        gathered = yield AllGather(joined([places.int(), values]))
        head = self.num_sent * _PLACE_BYTES
        out.zero_()
        for one in gathered:
            places = one[:head].view(torch.int32)
            out.index_add_(0, places, one[head:].clone().view(out.dtype))

    def _operation_bytes(self) -> Sequence[float]:
        each = _PLACE_BYTES + self.segment.dtype.itemsize
        return [(self.segment.num_members - 1) * self.num_sent * each]
