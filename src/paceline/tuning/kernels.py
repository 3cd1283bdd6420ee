"""Candidate: the kernel of the optimizer's step: one pass over each parameter, or over all at once.

``fused`` makes the whole update of a parameter in one pass over its memory, ``foreach`` makes each
operation for all parameters together; the numbers are the same up to rounding. The store has
kernels of its own (``store/optimizer_copy.py``), so this matters where the user's optimizer steps
itself.

Source: PyTorch documentation, torch.optim, "Algorithms": foreach and fused implementations.
"""

from collections.abc import Sequence

import torch

from ..errors import ConfigError
from ..speed import AS_IT_IS, Speed, Value
from .candidate import Objects, TrialSubject

name = "optimizer"
needs_feed = False
needs_whole_batch = False
keeps_bits = False

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Exact classes that have a fused kernel on the CPU and on CUDA."""


def options(subject: TrialSubject, speed: Speed) -> Sequence[Value]:
    optimizer = subject.objects.optimizer
    groups = optimizer.param_groups
    is_chosen = any(group.get("fused") or group.get("foreach") for group in groups)
    if not subject.steps_itself or is_chosen or "foreach" not in groups[0]:
        return ()
    return ("fused", "foreach") if type(optimizer) in _FUSED else ("foreach",)


def apply(objects: Objects, value: Value) -> None:
    if value == AS_IT_IS:
        return
    optimizer = objects.optimizer
    if value == "fused" and type(optimizer) not in _FUSED:
        raise ConfigError(
            f"{type(optimizer).__name__} has no fused kernel; leave --fused-optimizer out, or use "
            f"{', '.join(one.__name__ for one in _FUSED)}"
        )
    for group in (*optimizer.param_groups, optimizer.defaults):
        group["fused"], group["foreach"] = value == "fused", value == "foreach"


def words(value: Value) -> str:
    return f"{value} optimizer"
