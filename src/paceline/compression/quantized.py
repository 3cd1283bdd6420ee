"""int8: a byte a number, in blocks that have a scale each; every member adds up its own part.

    member i       parts 0 | 1 | 2, each rounded    --swap-->    part i of all members
                                                                 added up in full precision
    all members    parts 0 | 1 | 2, the mean        <--gather--  the sum, rounded once more

A block is at most 1024 numbers, a multiple of 4; its scale s is its largest magnitude / 127, and
q = round(x / s). Numbers are never added up as bytes, so nothing overflows, and there are two
roundings, however many members there are. What the first cuts off stays with who has sent it. What
the second cuts off of part i stays with member i, in the same residual: its own numbers of that
part were never rounded.

Source: D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD
via Gradient Quantization and Encoding", NIPS 2017 (blocks with a scale each). Rounding is to the
nearest here, not random: error feedback takes what that leaves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import AllGather, AllToAll, Compressor, Exchanging, Segment

_MOST_OF_BLOCK = 1024
_LEVELS = 127
_SCALE_BYTES = 4


class Int8(Compressor):
    """8 bits a number."""

    def __init__(self, segment: Segment, value: int | None = None) -> None:
        super().__init__(segment, value)
        num_members = segment.num_members
        part = max(1, -(-segment.size // num_members))
        self._num_blocks = -(-part // _MOST_OF_BLOCK)
        of_four = -(-part // (_SCALE_BYTES * self._num_blocks))  # so that all scales are aligned
        self._block = _SCALE_BYTES * of_four
        self._shape = (num_members, self._num_blocks, self._block)

    def exchange(self, x: Tensor, out: Tensor) -> Exchanging:
        seat = self.segment.seat
        parts = self._padded(x)
        wire = _encode(parts)
        total = parts[seat].clone()
        parts -= _decode(wire, parts)
        came = yield AllToAll(wire)
        for other in range(self.segment.num_members):
            if other != seat:
                total += _decode(came[other : other + 1], total[None])[0]
        reply = _encode(total[None])
        torch.sub(total, _decode(reply, total[None])[0], out=parts[seat])
        if parts.data_ptr() != x.data_ptr():
            x.copy_(parts.view(-1)[: len(x)])
        gathered = yield AllGather(reply[0])
        out.copy_(_decode(gathered, parts).view(-1)[: len(out)])

    def _padded(self, x: Tensor) -> Tensor:
        """``(P, blocks, block)``, the numbers of x and zeros behind them."""
        size = self.segment.num_members * self._num_blocks * self._block
        if size == len(x):
            return x.view(self._shape)
        padded = x.new_zeros(size)
        padded[: len(x)] = x
        return padded.view(self._shape)

    def _operation_bytes(self) -> Sequence[float]:
        num_bytes = self._num_blocks * (_SCALE_BYTES + self._block)
        return [(self.segment.num_members - 1) * num_bytes] * 2


def _encode(parts: Tensor) -> Tensor:
    """Each part's scales and bytes: ``(P, blocks * (4 + block))`` of ``(P, blocks, block)``.

    A block that is not finite is not finite again when it is decoded.
    """
    num_parts, num_blocks, block = parts.shape
    head = num_blocks * _SCALE_BYTES
    scales = parts.abs().amax(-1).div_(_LEVELS).float()
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    wire = torch.empty(num_parts, head + num_blocks * block, dtype=torch.uint8, device=parts.device)
    wire[:, :head] = scales.view(torch.uint8)
    wire[:, head:].view(torch.int8).view(parts.shape).copy_((parts / scales[..., None]).round_())
    return wire


def _decode(wire: Tensor, like: Tensor) -> Tensor:
    """The numbers again, of the shape and type of ``like``."""
    num_parts, num_blocks, _ = like.shape
    head = num_blocks * _SCALE_BYTES
    scales = wire[:, :head].view(torch.float32).to(like.dtype)
    steps = wire[:, head:].view(torch.int8).view(num_parts, num_blocks, -1)
    return steps * scales[..., None]
