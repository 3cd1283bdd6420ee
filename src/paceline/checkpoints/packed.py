"""What a member remembers as JSON and tensors, and back: no pickle, so loading runs no code.

    {"lr": 0.1, "milestones": Counter({30: 1}), "ema": Tensor}
        -> {"dict": [["lr", 0.1], ["milestones", {"counter": [[30, 1]]}], ["ema", {"tensor": 0}]]}
         + {"0": Tensor}

Numbers come back bit for bit. What cannot be said so is refused with the place where it stands.
This module must not know files or who remembers what.
"""

import collections
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

_DEEPEST = 100


def pack(value: object, tensors: dict[str, Tensor], where: str = "") -> Any:
    """``value`` as JSON; its tensors are put into ``tensors`` under numbers.

    Args:
        value: None, booleans, numbers, texts, tensors, and lists, tuples and dicts of them.
        where: what it is, for the message.

    Raises:
        ConfigError: something in it is none of these; it is named.
    """
    if value is None or isinstance(value, str) or type(value) in (bool, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, collections.Counter) else "dict"
        pairs = ((key, one, f"{where}[{key!r}]") for key, one in value.items())
        return {kind: [[pack(k, tensors, w), pack(one, tensors, w)] for k, one, w in pairs]}
    if isinstance(value, list | tuple | collections.deque):
        rows = [pack(one, tensors, f"{where}[{i}]") for i, one in enumerate(value)]
        return {"tuple": rows} if isinstance(value, tuple) else rows
    return _pack_number(value, tensors, where)


def _pack_number(value: object, tensors: dict[str, Tensor], where: str) -> Any:
    """Numbers and arrays of NumPy, which schedulers and samplers like to hold."""
    if type(value).__module__ == "numpy":
        array: Any = value
        if array.ndim == 0:
            return pack(array.item(), tensors, where)
        try:
            return {"array": pack(torch.from_numpy(array.copy()), tensors, where)}
        except TypeError:
            pass
    raise ConfigError(
        f"a checkpoint cannot hold {where or 'this'}: it is a {type(value).__name__}; numbers, "
        "texts, tensors, and lists and dicts of them can be kept"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor], _depth: int = 0) -> Any:
    """What ``pack`` was given.

    Raises:
        ConfigError: it was not written by ``pack``.
    """
    if _depth > _DEEPEST:
        raise ConfigError("what was packed is nested too deep")
    if isinstance(value, list):
        return [unpack(one, tensors, _depth + 1) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ConfigError(f"what was packed has {len(value)} keys, not one")
    ((kind, body),) = value.items()
    try:
        return _unpack(kind, body, tensors, _depth + 1)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"what was packed as {kind!r:.40} is broken: {error!r:.200}") from None


def _unpack(kind: str, body: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if kind == "tensor":
        return tensors[body]
    if kind == "array":
        return unpack(body, tensors, depth).numpy()
    if kind == "float":
        return float(body)
    rows = [unpack(one, tensors, depth) for one in body]
    if kind == "tuple":
        return tuple(rows)
    if kind == "dict":
        return dict(rows)
    if kind == "counter":
        return collections.Counter(dict(rows))
    raise ConfigError(f"what was packed is of the unknown kind {kind!r:.40}")
