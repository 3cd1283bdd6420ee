"""What users hand to a store, checked: one pair or many, the right shape and kind of tensor.

A wrong shape would otherwise be broadcast and a wrong dtype converted, without a word. This module
must not know how values are stored.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError
from .index import Record

Values: TypeAlias = Tensor | Sequence[Tensor]
"""One tensor, or one of each device."""

_V = TypeVar("_V")


def pairs_of(key: str | Mapping[str, _V], value: _V | None) -> list[tuple[str, _V]]:
    """``(key, value)`` of a call with one key and its value, or with a dict."""
    if isinstance(key, Mapping):
        if value is not None:
            raise ConfigError("a dict of keys brings its own values: leave the second argument out")
        return list(key.items())
    if value is None:
        raise ConfigError(
            f"key {key!r} came without a value; many keys go as a dict {{key: value}}"
        )
    return [(key, value)]


def each_once(keys: Iterable[str]) -> dict[str, None]:
    """The keys of a list, refused if one stands there twice."""
    names = list(keys)
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(f"key {name!r} is given twice; leave one out")
    return dict.fromkeys(names)


def check_key(key: object) -> None:
    if not isinstance(key, str) or not key:
        raise ConfigError(f"a key must be a text that is not empty, got {key!r}")


def check_tensor(key: str, value: object, what: str = "value") -> None:
    """A dense tensor with memory."""
    if not isinstance(value, Tensor):
        hint = "; torch.as_tensor(it) makes one" if hasattr(value, "__array__") else ""
        raise ConfigError(f"{what} of key {key!r} must be a tensor, got {_kind(value)}{hint}")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise ConfigError(
            f"{what} of key {key!r} must be a dense tensor with memory, got {value.layout} on "
            f"{value.device}; for a sparse one push value.to_dense()"
        )


def check_like(record: Record, value: object, what: str = "value") -> None:
    """A tensor of the key's own shape and dtype."""
    check_tensor(record.key, value, what)
    assert isinstance(value, Tensor)
    if tuple(value.shape) != record.shape:
        raise ConfigError(
            f"{what} of key {record.key!r} must have shape {record.shape}, got "
            f"{tuple(value.shape)}; nothing is broadcast"
        )
    if value.dtype != record.dtype:
        raise ConfigError(
            f"{what} of key {record.key!r} must be {record.dtype}, got {value.dtype}; "
            f"value.to({record.dtype}) converts it"
        )


def total_of(record: Record, value: Values) -> Tensor:
    """What is pushed, as one dense tensor on the CPU: the sum where it is a list."""
    if isinstance(value, Tensor):
        check_like(record, value)
        return _dense(value)
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(
            f"value of key {record.key!r} must be a tensor or a list of at least one, "
            f"got {_kind(value)}"
        )
    for one in value:
        check_like(record, one, "each value")
    if len(value) == 1:
        return _dense(value[0])
    total = _dense(value[0]) + _dense(value[1])
    for one in value[2:]:
        total.add_(_dense(one))
    return total


def _dense(value: Tensor) -> Tensor:
    return value.detach().to("cpu").contiguous()


def _kind(value: object) -> str:
    return (
        "an empty list" if isinstance(value, list | tuple) and not value else type(value).__name__
    )
