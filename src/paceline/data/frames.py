"""A mini-batch as bytes that outlive who read it: files without a name, in memory.

    0   skeleton (pickle) | small tensor | ...      written here
    1   a large tensor                              where its loader worker has put it: no copy
    2   another one

Who asks for a mini-batch is handed the open files and reads them by itself, so giving it takes no
time of who made it, however large it is, and nothing is lost where that one is killed. This module
must not know streams.

Source: PEP 574, "Pickle protocol 5 with out-of-band data"; memfd_create(2).
"""

import io
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy

_LARGE_BYTES = 1 << 15
"""From where on a tensor is left where it is: an open file more takes as long as that to copy."""
_MOST_FILES = 3
"""Of a mini-batch, of which a reader keeps many: a process may have 1024."""


class Memory:
    """An open file without a name, closed when nobody here refers to it any more.

    Args:
        handle: of the open file; it is this object's from now on.
    """

    __slots__ = ("handle",)

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @classmethod
    def new(cls) -> "Memory":
        """An empty one."""
        if sys.platform == "linux":
            return cls(os.memfd_create("paceline-stream"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def __del__(self) -> None:
        os.close(self.handle)

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """One part after the other, from its beginning.

        Raises:
            MemoryError: there is no room for them.
        """
        position = 0
        for part in parts:
            left = memoryview(part).cast("B")
            while len(left):
                try:
                    count = os.pwrite(self.handle, left, position)
                except OSError as error:
                    raise MemoryError(f"no room for a mini-batch: {error.strerror}") from error
                left, position = left[count:], position + count

    def read_into(self, buffer: memoryview, position: int) -> None:
        """As many bytes as the buffer has, from there on.

        Raises:
            EOFError: there are fewer.
        """
        while len(buffer):
            count = os.preadv(self.handle, [buffer], position)
            if not count:
                raise EOFError("a mini-batch is cut short")
            buffer, position = buffer[count:], position + count


class Part(NamedTuple):
    """Where the skeleton or a tensor lies: so many bytes of a file, from a position on."""

    file: int
    position: int
    size: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One mini-batch.

    Attributes:
        parts: the skeleton and the tensors.
    """

    num_samples: int
    parts: tuple[Part, ...]
    files: tuple[Memory, ...]


class _Pickler(pickle.Pickler):
    """Tensors leave their memory aside: torch's own way would write it twice.

    Attributes:
        tensors: in the order of their buffers.
    """

    def __init__(self, file: io.BytesIO, callback: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=callback)
        self.tensors: list[Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        if value.requires_grad or value.device.type != "cpu" or value.is_conj() or value.is_neg():
            return NotImplemented
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        self.tensors.append(flat)
        memory: Any = flat.numpy()
        return _tensor, (pickle.PickleBuffer(memory), value.dtype, tuple(value.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    flat = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0)
    return flat.view(dtype).view(shape) if len(buffer) else torch.empty(shape, dtype=dtype)


class Packed(NamedTuple):
    """A batch taken apart: a queue carries it with one open file for each large tensor alone."""

    head: bytes
    parts: tuple[bytes | Tensor, ...]


def pack(batch: Any) -> Packed:
    """What stands in a batch: its skeleton, a copy of what is small, and its large tensors."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = _Pickler(file, buffers.append)
    pickler.dump(batch)
    pairs = zip(pickler.tensors, buffers, strict=True)
    return Packed(
        file.getvalue(),
        tuple(one if one.numel() >= _LARGE_BYTES else bytes(memory.raw()) for one, memory in pairs),
    )


def encode(num_samples: int, batch: Any) -> Frame:
    """A copy of what stands in a batch, or in a packed one.

    Raises:
        MemoryError: there is no room for it.
    """
    packed = batch if isinstance(batch, Packed) else pack(batch)
    written: list[bytes | memoryview] = [packed.head]
    parts, files, position = [Part(0, 0, len(packed.head))], [Memory.new()], len(packed.head)
    for one in packed.parts:
        if isinstance(one, Tensor):
            lies_at = _memory_of(one) if len(files) < _MOST_FILES else None
            if lies_at is not None:
                parts.append(Part(len(files), lies_at[1], one.numel()))
                files.append(lies_at[0])
                continue
        memory: Any = one.numpy() if isinstance(one, Tensor) else one
        written.append(memoryview(memory))
        parts.append(Part(0, position, len(written[-1])))
        position += len(written[-1])
    files[0].write(written)
    return Frame(num_samples, tuple(parts), tuple(files))


def _memory_of(tensor: Tensor) -> tuple[Memory, int] | None:
    """The file that a loader worker has put it into, and where; None: there is none."""
    storage: Any = tensor.untyped_storage()
    by_files = get_sharing_strategy() == "file_descriptor"
    if not (by_files and storage.is_shared()):
        return None
    handle, _ = storage._share_fd_cpu_()  # its own; torch's queues hand it on so
    return Memory(os.dup(handle)), int(tensor.storage_offset())


def decode(frame: Frame) -> Any:
    """The batch, each time anew, in memory of torch's own: sums come out as in the reader's.

    Raises:
        EOFError: the frame is cut short.
    """
    buffers = []
    for part in frame.parts:
        memory: Any = torch.empty(part.size, dtype=torch.uint8).numpy()
        buffers.append(memoryview(memory))
        frame.files[part.file].read_into(buffers[-1], part.position)
    head, *others = buffers
    return pickle.loads(head, buffers=others)
