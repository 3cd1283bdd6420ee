"""Leaving a step between two layers: hooks that look at one word.

Backward is left in the post-accumulate hooks (compute/replica.py); here are the forward ones. In
a compiled model module hooks would break the graph, so there a step is left between forward,
backward and step only. This module must not know who cancels, or why.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


def is_compiled(model: nn.Module) -> bool:
    """Whether calling the model runs a compiled graph."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def grain(model: nn.Module) -> str:
    """Where work in flight can be left, in words for the plan."""
    return "between passes (compiled)" if is_compiled(model) else "between layers"


def watch_forward(model: nn.Module, check: Callable[[], None]) -> None:
    """Call ``check`` before each layer's forward; it may raise to leave the step."""
    compiled: Any = getattr(model, "_compiled_call_impl", None)
    if compiled is not None:  # around it: a hook inside would break the graph

        def watched(*arguments: Any, **options: Any) -> Any:
            check()
            return compiled(*arguments, **options)

        model._compiled_call_impl = watched
        return
    if is_compiled(model):
        model.register_forward_pre_hook(lambda *_: check())
        return
    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_pre_hook(lambda *_: check())
