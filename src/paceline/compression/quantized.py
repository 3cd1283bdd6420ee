"""int8, int4: 8 or 4 bits per number, in blocks with a scale; each member adds up its own part.

    member i       parts 0 | 1 | 2, each rounded    --swap-->    part i of all members
                                                                 added up in full precision
    all members    parts 0 | 1 | 2, the mean        <--gather--  the sum, rounded once more

    int8   L = 127   blocks of at most 1024, a multiple of 4      q                  one per byte
    int4   L = 7     blocks of at most 128, a multiple of 8       q0 | q1 << 4       two per byte

The scale s of a block is its largest magnitude / L, and q = round(x / s). The integers q are never
added up, so nothing overflows, and there are two roundings, however many members there are. The
error of the first stays with the member that sent the numbers. The error of the second, in part i,
stays with member i, in the same residual: its own numbers of that part were never rounded.

Source: D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD
via Gradient Quantization and Encoding", NIPS 2017 (blocks with a scale each). Changed: rounding is
to the nearest, not random, since error feedback makes up for its error. Four bits for differences
of parameters: A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv
2501.18512, 2025, section 2.4. Changed: integers in small blocks, not floats of 4 bits.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .base import AllGather, AllToAll, Compressor, Exchanging, Segment

_SCALE_BYTES = 4


class Quantized(Compressor):
    """Sends integers of few bits.

    Attributes:
        levels: L, the largest integer.
        most_of_block: the most numbers that share a scale.
        per_byte: the integers in a byte.
    """

    levels: ClassVar[int]
    most_of_block: ClassVar[int]
    per_byte: ClassVar[int] = 1

    def __init__(self, segment: Segment, value: int | None = None) -> None:
        super().__init__(segment, value)
        num_members = segment.num_members
        part_size = max(1, -(-segment.size // num_members))
        self._num_blocks = -(-part_size // self.most_of_block)
        aligned = _SCALE_BYTES * self.per_byte  # so that all scales are aligned
        self._block_size = aligned * -(-part_size // (aligned * self._num_blocks))
        self._shape = (num_members, self._num_blocks, self._block_size)
        self._scales_bytes = self._num_blocks * _SCALE_BYTES

    def exchange(self, x: Tensor, out: Tensor) -> Exchanging:
        seat = self.segment.seat
        parts = self._padded(x)
        wire = self._encode(parts)
        total = parts[seat].clone()
        parts -= self._decode(wire, parts)
        received = yield AllToAll(wire)
        for other in range(self.segment.num_members):
            if other != seat:
                total += self._decode(received[other : other + 1], total[None])[0]
        reply = self._encode(total[None])
        torch.sub(total, self._decode(reply, total[None])[0], out=parts[seat])
        if parts.data_ptr() != x.data_ptr():
            x.copy_(parts.view(-1)[: len(x)])
        gathered = yield AllGather(reply[0])
        out.copy_(self._decode(gathered, parts).view(-1)[: len(out)])

    def _padded(self, x: Tensor) -> Tensor:
        """Return x, padded with zeros, as ``(P, blocks, block)``."""
        size = self.segment.num_members * self._num_blocks * self._block_size
        if size == len(x):
            return x.view(self._shape)
        padded = x.new_zeros(size)
        padded[: len(x)] = x
        return padded.view(self._shape)

    def _operation_bytes(self) -> Sequence[float]:
        num_bytes = self._num_blocks * (_SCALE_BYTES + self._block_size // self.per_byte)
        return [(self.segment.num_members - 1) * num_bytes] * 2

    def _encode(self, parts: Tensor) -> Tensor:
        """Encode parts, ``(P, blocks, block)``, as their scales and integers.

        A block that is not finite will not be finite when it is decoded.

        Returns:
            ``(P, blocks * (4 + block / per_byte))``, uint8.
        """
        num_parts, scales_bytes = len(parts), self._scales_bytes
        scales = parts.abs().amax(-1).div_(self.levels).float()
        scales.clamp_(min=torch.finfo(torch.float32).tiny)
        width = scales_bytes + parts[0].numel() // self.per_byte
        wire = torch.empty(num_parts, width, dtype=torch.uint8, device=parts.device)
        wire[:, :scales_bytes] = scales.view(torch.uint8)
        steps = (parts / scales[..., None]).round_().view(num_parts, -1)
        self._pack(steps, wire[:, scales_bytes:].view(torch.int8))
        return wire

    def _decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """Return the numbers that ``wire`` encodes, in the shape and type of ``like``."""
        scales = wire[:, : self._scales_bytes].view(torch.float32).to(like.dtype)
        steps = self._unpack(wire[:, self._scales_bytes :].view(torch.int8))
        return steps.view(len(steps), self._num_blocks, -1) * scales[..., None]

    def _pack(self, steps: Tensor, out: Tensor) -> None:
        """Write integers, ``(P, n)``, to ``out``, ``(P, n / per_byte)`` int8."""
        out.copy_(steps)

    def _unpack(self, packed: Tensor) -> Tensor:
        """Return the integers, ``(P, n)`` int8, of what ``_pack`` wrote."""
        return packed


class Int8(Quantized):
    """Sends 8 bits per number."""

    levels, most_of_block = 127, 1024


class Int4(Quantized):
    """Sends 4 bits per number."""

    levels, most_of_block, per_byte = 7, 128, 2

    def _pack(self, steps: Tensor, out: Tensor) -> None:
        pairs = steps.to(torch.int8)
        torch.bitwise_or(pairs[:, 0::2] & 15, pairs[:, 1::2] << 4, out=out)

    def _unpack(self, packed: Tensor) -> Tensor:
        low = (packed << 4) >> 4  # shifting an int8 right extends its sign
        return torch.stack((low, packed >> 4), dim=-1).flatten(1)
