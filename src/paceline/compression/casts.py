"""fp16 and bf16: 16 bits per number, and an all-reduce in that type.

    x -> 16 bits -> sum over members, in 16 bits -> mean
    the cast's rounding error is the residual; the rounding of the link's additions is lost

fp16 has 11 binary digits and ranges from 6e-8 to 65504; an update beyond that is not finite. bf16
has 8 digits, and the range of float32. The residual also carries numbers that are too small for
fp16, so no loss scale is needed.

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
        cast = x.to(self.dtype)
        x.sub_(cast)
        out.copy_((yield AllReduce(cast)))

    def _operation_bytes(self) -> Sequence[float]:
        num_members = self.segment.num_members
        return [2 * (num_members - 1) / num_members * 2 * self.segment.size]


class Fp16(_Cast):
    """Sends IEEE half precision."""

    dtype = torch.float16


class Bf16(_Cast):
    """Sends bfloat16: the first 16 bits of float32, rounded."""

    dtype = torch.bfloat16
