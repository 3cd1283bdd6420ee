"""Inputs as they are written on a command line: ``1,1,28,28`` or ``1,128:int64``.

This module must not know models.
"""

from typing import NamedTuple

import torch

from ..errors import ConfigError, unknown

_TYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}


class InputShape(NamedTuple):
    """One input: its shape without the batch, and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def parse_input(text: str) -> InputShape:
    """One ``--input``: sizes with the batch first, and a type where it is not float32.

    Raises:
        ConfigError: it is none.

    Example:
        >>> parse_input("1,128:int64")
        InputShape(shape=(128,), dtype=torch.int64)
    """
    sizes, _, kind = text.partition(":")
    if kind and kind not in _TYPES:
        raise unknown("type", kind, _TYPES, f"--input {text}")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(
            f"--input {text!r} must be sizes >= 1 with the batch first, such as 1,1,28,28 or "
            f"1,128:int64"
        )
    return InputShape(shape[1:], _TYPES[kind or "float32"])
