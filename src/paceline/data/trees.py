"""Tensors in nested lists, tuples and dicts, as batches are. It must not know what they mean."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def apply(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``change`` every tensor in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)({key: apply(change, one) for key, one in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(apply(change, one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(apply(change, one) for one in value)
    return value
