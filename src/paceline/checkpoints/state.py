"""State on disk without pickle, so that loading runs no code: a model's, and what members remember.

    a model     safetensors, whole or not at all; it loads without Paceline
    the rest    {"lr": 0.1, "milestones": Counter({30: 1}), "ema": Tensor}
                  -> {"dict": [["lr", 0.1], ["milestones", {"counter": [[30, 1]]}],
                               ["ema", {"tensor": "0"}]]} + {"0": Tensor}

A file is written aside, synced, then renamed. Packed numbers come back bit for bit; what cannot be
said so is refused with the place where it stands. This module must not know runs, or who remembers
what.
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
_ALIGN_BYTES = 8


def model_file(model: nn.Module) -> bytes:
    """All parameters and buffers as a safetensors file."""
    state = tensors_of(model)
    return b"".join(tensor_chunks(state, state.__getitem__))


def save_model(model: nn.Module, path: Path, identity: Sequence[int] | None = None) -> None:
    """Write ``model_file`` to ``path``; ``identity``: of the folder that it has to be in."""
    state = tensors_of(model)
    save_tensors(state, state.__getitem__, path, identity)


def save_tensors(
    shapes: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    path: Path,
    identity: Sequence[int] | None = None,
) -> None:
    """Write a safetensors file, one tensor after the other: no two are in memory for it.

    Args:
        shapes: names, with tensors of those types and shapes, which may have no memory.
        read: a name's tensor.
        identity: as of ``save_model``.

    Raises:
        ConfigError: the format has no such type of numbers.
        FileError: it cannot be written there.
    """
    chunks = tensor_chunks(shapes, read)
    if identity is None:
        write_whole(path, chunks)
        return
    with closing(OpenFolder.open(path.parent, identity)) as place:
        place.replace(path.name, chunks, is_synced=True)


def uncompiled(model: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given, where the model is what it has returned."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """``state_dict()``, names without a compiler's prefix; of extra state only what is a tensor.

    What is read from a file of ``save_model`` is held against this.
    """
    found: dict[str, Any] = uncompiled(model).state_dict()
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


_TYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.int16: "I16", torch.uint16: "U16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32",
    torch.float32: "F32", torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64",
    torch.uint64: "U64",
}  # fmt: skip
"""Of numbers, as the format calls them; tensors of later ones lie before those of earlier ones.
Source: github.com/huggingface/safetensors, "Format" in its README, and Dtype in its tensor.rs."""


def tensor_chunks(shapes: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> Iterator[Any]:
    """The file, piece by piece; see ``save_tensors``."""
    ranks = {kind: rank for rank, kind in enumerate(_TYPES)}
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
    """The tensors of a safetensors file.

    Raises:
        ConfigError: it is none, or is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with open_to_read(path) as file:
            return load_file(name_of(file.fileno(), path))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        text = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} is no whole .safetensors file: {text!s:.300}") from None


def write_whole(path: Path, data: bytes | Iterator[Any]) -> None:
    """Write ``data`` so that ``path`` holds either its old content or all of the new one.

    Args:
        data: all of it, or piece by piece.

    Raises:
        FileError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.parent / part_of(path.name)
        with open(beside, "xb") as file:  # who may read it follows from the umask, as elsewhere
            lock_part(file.fileno())
            try:
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(beside, path)
            except BaseException:  # raised again: no half file stays
                os.unlink(beside)
                raise
    except OSError as error:
        raise FileError(error.errno, f"{error.strerror}: it is not written", str(path)) from error


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
    if isinstance(value, list | tuple | collections.deque) and not hasattr(value, "_fields"):
        if all(type(item) is int for item in value):  # as random states have hundreds of
            rows = list(value)
        else:
            rows = [pack(one, tensors, f"{where}[{i}]") for i, one in enumerate(value)]
        if isinstance(value, collections.deque):
            return {"deque": [rows, value.maxlen]}
        return {"tuple": rows} if isinstance(value, tuple) else rows
    return _pack_number(value, tensors, where)


def can_be_packed(value: object) -> bool:
    """Whether ``pack`` takes it."""
    try:
        pack(value, {})
    except ConfigError:
        return False
    return True


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
        "texts, tensors, and lists, tuples and dicts of them can be kept"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor], _depth: int = 0) -> Any:
    """What ``pack`` was given.

    Raises:
        ConfigError: it was not written by ``pack``.
    """
    if _depth > _DEEPEST:
        raise ConfigError("what was packed is nested too deep")
    if isinstance(value, list):
        return [unpack(item, tensors, _depth + 1) for item in value]
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
    rows = [unpack(row, tensors, depth) for row in body]
    if kind == "deque":
        values, most = rows
        return collections.deque(values, most)
    if kind == "tuple":
        return tuple(rows)
    if kind == "dict":
        return dict(rows)
    if kind == "counter":
        return collections.Counter(dict(rows))
    raise ConfigError(f"what was packed is of the unknown kind {kind!r:.40}")
