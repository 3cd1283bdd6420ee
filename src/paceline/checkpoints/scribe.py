"""The writer beside the run: a version that is pinned in shared memory becomes files.

    coordinator --request--> scribe: pinned bytes -> safetensors -> seal --answer--> coordinator

It is a process of its own (``python -m paceline.checkpoints.scribe``), so no step waits for a
disk: a member has copied the version into the memory's pinned area before, in the order of all
updates. Tensors get their own shapes here, also those that lie permuted (channels_last). One
request a line on standard input, one answer a line on standard output; it ends with its parent.
This module must not know runs, members or torch.
"""

import json
import math
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

from ..system.files import OpenFolder, open_to_read
from ..system.signals import leave_to_the_launcher
from .shelf import CheckpointFolder, number_of

LAYOUT = "layout.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_FILES = {MODEL: ("parameters", "buffers"), OPTIMIZER: ("state",)}
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def write(request: dict[str, Any], memory: Any) -> dict[str, Any]:
    """Write and seal one checkpoint; what became of it, never an exception of the disk's.

    Args:
        request: ``aside`` (its folder, with the members' own files in it), ``shelf``, ``keep``,
            ``files`` (name -> JSON value), ``sync`` (files outside that must be on the disk
            before), and ``within`` (the identity of the run's folder).
        memory: a buffer over the store's memory.

    Returns:
        ``{"sealed": path, "took_s": seconds}`` or ``{"failed": reason}``.
    """
    start_s = time.monotonic()
    aside, within = Path(request["aside"]), request.get("within")
    shelf = CheckpointFolder(Path(request["shelf"]), request["keep"], within)
    try:
        with shelf.open_aside(number_of(aside)) as place:
            for name, value in request["files"].items():
                place.write(name, json.dumps(value, allow_nan=False).encode())
            _write_tensors(place, memory)
        for outside in request["sync"]:
            with open_to_read(Path(outside)) as file:
                os.fsync(file.fileno())
        path = shelf.seal(aside)
    except OSError as error:
        shelf.drop(aside)
        return {"failed": error.strerror or str(error)}
    return {"sealed": str(path), "took_s": time.monotonic() - start_s}


def _write_tensors(aside: OpenFolder, memory: Any) -> None:
    """The pinned block as safetensors: the model by its own names, the optimizer's state beside."""
    with aside.read(LAYOUT) as file:
        layout = json.load(file)
    for name, sections in _FILES.items():
        rows = [row for section in sections for row in layout[section]]
        _write_safetensors(aside.fresh(name), rows, memory, layout["at"])


def _write_safetensors(fd: int, rows: list[list[Any]], memory: Any, at: int) -> None:
    """Straight from memory to the file, without a copy of the model in between.

    The format: the header's length (8 bytes, little-endian), the header (JSON), the data.
    Source: https://github.com/huggingface/safetensors#format
    """
    header, end = {}, 0
    with open(fd, "wb") as file:
        for name, dtype, item_bytes, shape, _, _ in rows:
            if dtype not in _DTYPES:
                raise OSError(f"safetensors knows no {dtype}, which {name!r} is of")
            begin, end = end, end + math.prod(shape) * item_bytes
            header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, item_bytes, shape, strides, offset in rows:
            file.write(_dense(memory, at + offset, item_bytes, shape, strides))


def _dense(memory: Any, offset: int, item_bytes: int, shape: list[int], strides: list[int]) -> Any:
    """The bytes of one tensor in the order of its shape; a view where they lie so."""
    count, dense = math.prod(shape), 1
    is_dense = True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        is_dense &= size == 1 or stride == dense
        dense *= size
    if is_dense:
        return memoryview(memory)[offset : offset + count * item_bytes]
    import numpy as np

    # As opaque items of their size: NumPy knows no bfloat16, and moving is all that is done.
    flat = np.frombuffer(memory, np.dtype((np.void, item_bytes)), count, offset)
    steps = [one * item_bytes for one in strides]
    return np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False).tobytes()


def main() -> None:
    """Entry of ``python -m paceline.checkpoints.scribe FD``; the end of its input ends it."""
    leave_to_the_launcher()
    descriptor = int(sys.argv[1])
    memory: mmap.mmap | None = None
    for line in sys.stdin:
        if memory is None:
            memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        answer = json.dumps(write(json.loads(line), memory)).encode() + b"\n"
        try:
            os.write(1, answer)
        except BrokenPipeError:  # the launcher is gone
            return


if __name__ == "__main__":
    main()
