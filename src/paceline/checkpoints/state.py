"""State on disk without pickle, so that loading runs no code: a model's, and that of members.

    a model     safetensors, complete or not there at all; it loads without Paceline
    the rest    {"lr": 0.1, "milestones": Counter({30: 1}), "ema": Tensor}
                  -> {"dict": [["lr", 0.1], ["milestones", {"counter": [[30, 1]]}],
                               ["ema", {"tensor": "0"}]]} + {"0": Tensor}

A file is written under another name, synced, then renamed. Packed numbers are restored bit for bit;
a value that has no such form is refused with its path, as in ``ema['deep'][0]``. This module must
not know runs, or whose state it is.
"""

import collections
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, FileError
from ..system.files import OpenFolder, lock_part, name_of, open_to_read, part_of

_DEEPEST = 100
"""Nesting of packed values; one value adds up to 2, so pack stops before unpack would."""
_ALIGN_BYTES = 8


def model_file(model: nn.Module) -> bytes:
    """Return all parameters and buffers as a safetensors file."""
    state = tensors_of(model)
    return b"".join(tensor_chunks(state, state.__getitem__))


def save_model(model: nn.Module, path: Path, identity: Sequence[int] | None = None) -> None:
    """Write a model's safetensors file.

    Args:
        identity: of the folder that ``path`` must be in; None: any folder.
    """
    state = tensors_of(model)
    save_tensors(state, state.__getitem__, path, identity)


def save_tensors(
    shapes: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    path: Path,
    identity: Sequence[int] | None = None,
) -> None:
    """Write a safetensors file tensor by tensor, so that only one of them is in memory at a time.

    Args:
        shapes: tensors of the types and shapes to write, by name; they may have no memory.
        read: returns the tensor of a name.
        identity: see ``save_model``.

    Raises:
        ConfigError: the format does not support a tensor's dtype.
        FileError: the file cannot be written.
    """
    chunks = tensor_chunks(shapes, read)
    if identity is None:
        write_whole(path, chunks)
        return
    with closing(OpenFolder.open(path.parent, identity)) as place:
        place.replace(path.name, chunks, is_synced=True)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``'s wrapper, or the model if it has none."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of ``state_dict()``, by names without a compiler's prefix.

    A file written by ``save_model`` holds exactly these.
    """
    state: dict[str, Any] = uncompiled(model).state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


_TYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.int16: "I16", torch.uint16: "U16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32",
    torch.float32: "F32", torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64",
    torch.uint64: "U64",
}  # fmt: skip
"""The format's names of dtypes; tensors of later dtypes precede those of earlier ones in a file.
Source: github.com/huggingface/safetensors, "Format" in its README, and Dtype in its tensor.rs."""


def tensor_chunks(shapes: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> Iterator[Any]:
    """Yield the file piece by piece; see ``save_tensors``."""
    ranks = {dtype: rank for rank, dtype in enumerate(_TYPES)}
    header, offset = {}, 0
    for name, tensor in shapes.items():
        if tensor.dtype not in _TYPES:
            raise ConfigError(f"{name} is {tensor.dtype}, which a safetensors file cannot hold")
    names = sorted(shapes, key=lambda name: (-ranks[shapes[name].dtype], name))
    for name in names:
        tensor = shapes[name]
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield read(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        ConfigError: the file is missing, has another format, or is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with open_to_read(path) as file:
            return load_file(name_of(file.fileno(), path))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} is not a complete .safetensors file: {reason!s:.300}") from None


def write_whole(path: Path, data: bytes | Iterator[Any]) -> None:
    """Write ``data`` so that ``path`` holds either its old content or all of the new one.

    Args:
        data: all of it, or an iterator over its pieces.

    Raises:
        FileError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.parent / part_of(path.name)
        with open(unfinished, "xb") as file:  # its mode follows from the umask, as elsewhere
            lock_part(file.fileno())
            try:
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(unfinished, path)
            except BaseException:  # raised again: no incomplete file stays
                os.unlink(unfinished)
                raise
    except OSError as error:
        raise FileError(error.errno, f"{error.strerror}: it is not written", str(path)) from error


def pack(value: object, tensors: dict[str, Tensor], where: str = "", _depth: int = 0) -> Any:
    """Return ``value`` as JSON; its tensors are added to ``tensors``, with numbers as names.

    Args:
        value: None, booleans, numbers, strings, tensors, and lists, tuples and dicts of them.
        where: what it is, for the message.

    Raises:
        ConfigError: something in it is none of these, or nested too deep; the message says where.
    """
    if _depth > _DEEPEST - 2:
        raise ConfigError(f"a checkpoint cannot hold {where:.60}...: it is nested too deep")
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
        places = ((key, item, f"{where}[{key!r}]") for key, item in value.items())
        return {
            kind: [
                [pack(key, tensors, place, _depth + 2), pack(item, tensors, place, _depth + 2)]
                for key, item, place in places
            ]
        }
    if isinstance(value, list | tuple | collections.deque) and not hasattr(value, "_fields"):
        is_deque = isinstance(value, collections.deque)
        if all(type(item) is int for item in value):  # random states have hundreds of them
            rows = list(value)
        else:
            depth = _depth + 1 + is_deque
            rows = [pack(item, tensors, f"{where}[{i}]", depth) for i, item in enumerate(value)]
        if isinstance(value, collections.deque):
            return {"deque": [rows, value.maxlen]}
        return {"tuple": rows} if isinstance(value, tuple) else rows
    return _pack_number(value, tensors, where, _depth)


def can_be_packed(value: object) -> bool:
    """Return whether ``pack`` supports this value."""
    try:
        pack(value, {})
    except ConfigError:
        return False
    return True


def _pack_number(value: object, tensors: dict[str, Tensor], where: str, depth: int) -> Any:
    """Pack a number or an array of NumPy, which schedulers and samplers often hold."""
    if type(value).__module__ == "numpy" and hasattr(value, "ndim"):
        array: Any = value
        if array.ndim == 0 and type(item := array.item()).__module__ != "numpy":
            return pack(item, tensors, where, depth)
        try:
            return {"array": pack(torch.from_numpy(array.copy()), tensors, where, depth)}
        except TypeError:  # torch has no such dtype
            pass
    raise ConfigError(
        f"a checkpoint cannot hold {where or 'this'}: it is a {type(value).__name__}; numbers, "
        "strings, tensors, and lists, tuples and dicts of them can be kept"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor], _depth: int = 0) -> Any:
    """Return the value that ``pack`` was given.

    Raises:
        ConfigError: ``value`` was not written by ``pack``.
    """
    if _depth > _DEEPEST:
        raise ConfigError("a packed value is nested too deep")
    if isinstance(value, list):
        return [unpack(item, tensors, _depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ConfigError(f"a packed value has {len(value)} keys instead of one")
    ((kind, body),) = value.items()
    try:
        return _unpack(kind, body, tensors, _depth + 1)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"a packed {kind!r:.40} is damaged: {error!r:.200}") from None


def _unpack(kind: str, body: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if kind == "tensor":
        return tensors[body]
    if kind == "array":
        return unpack(body, tensors, depth).numpy()
    if kind == "float":
        return float(body)
    rows = [unpack(row, tensors, depth) for row in body]
    if kind == "deque":
        values, maxlen = rows
        return collections.deque(values, maxlen)
    if kind == "tuple":
        return tuple(rows)
    if kind == "dict":
        return dict(rows)
    if kind == "counter":
        return collections.Counter(dict(rows))
    raise ConfigError(f"a packed value has the unknown kind {kind!r:.40}")
