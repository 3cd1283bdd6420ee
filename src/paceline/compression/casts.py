"""fp16 and bf16: half as many bits a number, and an all-reduce of those.

    x -> 16 bits -> sum over members, in 16 bits -> mean
    what the cast has cut off is the residual; what the link's additions round off is lost

fp16 has 11 binary digits and reaches from 6e-8 to 65504; beyond that an update is not finite. bf16
has 8, and the range of float32. The residual also carries what is too small for fp16, so no loss
scale is needed.

Source: P. Micikevicius et al., "Mixed Precision Training", ICLR 2018 (what 16 bits can hold).
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .base import AllReduce, Compressor, Exchanging


class _Cast(Compressor):
    dtype: ClassVar[torch.dtype]

    def exchange(self, x: Tensor, out: Tensor) -> Exchanging:
        small = x.to(self.dtype)
        x.sub_(small)
        out.copy_((yield AllReduce(small)))

    def _operation_bytes(self) -> Sequence[float]:
        num_members = self.segment.num_members
        return [2 * (num_members - 1) / num_members * 2 * self.segment.size]


class Fp16(_Cast):
    """IEEE half precision."""

    dtype = torch.float16


class Bf16(_Cast):
    """The first 16 bits of float32, rounded."""

    dtype = torch.bfloat16
