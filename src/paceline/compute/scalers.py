"""GradScalers after a step that was left: their per-optimizer stage must begin again.

A scaler that has unscaled an optimizer's gradients refuses to do it again before ``step``; a
superseded step never reaches it. This module must not know why a step was left.
"""

import gc
import sys
import weakref

from torch.optim import Optimizer

_found: "weakref.WeakSet[object]" = weakref.WeakSet()
_searched: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def reset_scalers(optimizer: Optimizer) -> None:
    """Put the stage of every live GradScaler for ``optimizer`` back to the beginning."""
    for name in ("grad_scale", "found_inf"):  # a scaler multiplies with what it finds there
        optimizer.__dict__.pop(name, None)
    module = sys.modules.get("torch.amp.grad_scaler")
    if module is None:
        return
    if optimizer not in _searched:
        _searched.add(optimizer)
        for one in gc.get_objects():
            if issubclass(type(one), module.GradScaler):
                _found.add(one)
    for scaler in _found:
        scaler._per_optimizer_states.pop(id(optimizer), None)  # type: ignore[attr-defined]
