"""Candidate: forward passes in 16 bits (autocast), only where the user lets numbers change.

bf16 has the range of fp32 with 8 bits of precision; fp16 has 11 bits and a small range, so its
losses are scaled (``script/amp.py``). Both need units that compute in them: without, they are
slower.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from collections.abc import Sequence

import torch

from ..speed import Speed, Value
from .candidate import Objects, TrialSubject

name = "precision"
needs_feed = False
needs_whole_batch = False
keeps_bits = False

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def options(subject: TrialSubject, speed: Speed) -> Sequence[Value]:
    if not subject.may_change_numbers:
        return ()
    # fp16 on a CPU is emulated by most kernels; bf16 is the same speed where both are there.
    return ("bf16",) if subject.is_on_cpu else ("bf16", "fp16")


def apply(objects: Objects, value: Value) -> None:
    """Nothing to change on the objects: ``pace.autocast()`` reads the choice."""


def words(value: Value) -> str:
    return str(value)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of a forward pass in ``precision``; fp32 is none at all."""
    if precision == "fp32":
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=DTYPES[precision])
