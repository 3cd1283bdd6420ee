"""What the layers of a model see of a batch that several workers share.

This module must not know workers.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norm_note(model: nn.Module, batch_size: int, parts: int) -> tuple[str, ...]:
    """For the plan: how many samples batch norm sees, where that is not the whole batch."""
    has_batch_norm = any(isinstance(one, _BatchNorm) and one.training for one in model.modules())
    if parts < 2 or not has_batch_norm:
        return ()
    return (
        f"batch norm normalises each mini-batch of {-(-batch_size // parts)} samples by itself, "
        f"not the {batch_size} of an update; its running statistics are averaged",
    )
