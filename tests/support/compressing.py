"""Members that exchange compressed gradients in one process, without a link.

It must not know what tests assert.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.compression import COMPRESSORS, Compression, Percentage
from paceline.compression.base import (
    AllReduce,
    AllToAll,
    Compressor,
    ErrorFeedback,
    Exchanging,
    Matrix,
    Operation,
    Segment,
)
from paceline.fields import written


def example(name: str) -> str:
    """An example spelling of a compressor."""
    arguments = COMPRESSORS[name].arguments
    return written(
        name, ["2%" if isinstance(argument, Percentage) else 2 for argument in arguments]
    )


class Member:
    """One seat with its compressor and residual."""

    def __init__(self, compressor: Compressor) -> None:
        segment = compressor.segment
        self.compressor = compressor
        self.feedback = ErrorFeedback(segment.size, segment.dtype, segment.device)

    @property
    def residual(self) -> Tensor:
        return self.feedback.residual

    def begin(self, own: Tensor, share: float, out: Tensor) -> Exchanging:
        return self.feedback.begin(self.compressor, 0, own, share, out)

    def keep(self) -> None:
        self.compressor.keep()
        self.feedback.keep()


def make_members(
    compression: Compression,
    size: int,
    num_members: int,
    matrices: Sequence[Matrix] = (),
    dtype: torch.dtype = torch.float32,
) -> list[Member]:
    """One member per seat."""
    made = []
    for seat in range(num_members):
        segment = Segment(
            size=size, dtype=dtype, device=torch.device("cpu"), seat=seat,
            num_members=num_members, matrices=matrices,
        )  # fmt: skip
        made.append(Member(compression.kind(segment, compression.value)))
    return made


def exchange(
    members: Sequence[Member], owns: Sequence[Tensor], shares: Sequence[float]
) -> tuple[list[Tensor], list[float]]:
    """One update: the result of each member, and the bytes each has sent."""
    outs = [torch.full_like(member.residual, float("nan")) for member in members]
    under_way = [
        member.begin(own, share, out)
        for member, own, share, out in zip(members, owns, shares, outs, strict=True)
    ]
    sent = [0.0] * len(members)
    for asked in _rounds(under_way):
        for seat, one in enumerate(asked):
            sent[seat] += one.sent_bytes(len(members))
    return outs, sent


def _rounds(under_way: Sequence[Exchanging]) -> list[list[Operation]]:
    every: list[list[Operation]] = []
    requests = [next(one) for one in under_way]
    while requests:
        every.append(requests)
        came, requests = _answers(requests), []
        for one, answer in zip(under_way, came, strict=True):
            try:
                requests.append(one.send(answer))
            except StopIteration:
                continue
        assert len(requests) in (0, len(under_way)), "members do not ask alike"
    return every


def _answers(asked: Sequence[Operation]) -> list[Tensor]:
    """The result of the operation in each member."""
    assert len({type(one) for one in asked}) == 1, asked
    tensors = [one.tensor for one in asked]
    if isinstance(asked[0], AllReduce):
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return [tensor.copy_(total) for tensor in tensors]
    if isinstance(asked[0], AllToAll):
        return [torch.stack([one[seat] for one in tensors]) for seat in range(len(tensors))]
    return [torch.stack(tensors) for _ in tensors]
