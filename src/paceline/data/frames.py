"""A mini-batch as bytes that outlive the process that read it: unnamed files in memory.

    0   skeleton (pickle) | small tensor | ...      written here
    1   a large tensor                              where its loader worker has put it: no copy
    2   another one

A client gets the open files and reads them by itself, so sending a mini-batch takes the reader no
time, however large it is, and nothing is lost if the reader is killed. This module must not know
streams.

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
"""A tensor of this size or more stays where it is: passing a file takes as long as a copy."""
_MOST_FILES = 3
"""Files of a mini-batch: a reader keeps many of those, and a process may have 1024."""


class Memory:
    """An open file without a name, closed with the last reference to this object.

    Args:
        handle: of the open file; this object owns it from now on.
    """

    __slots__ = ("handle",)

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @classmethod
    def new(cls) -> "Memory":
        """A new empty file."""
        if sys.platform == "linux":
            return cls(os.memfd_create("paceline-stream"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def __del__(self) -> None:
        os.close(self.handle)

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write the parts one after the other, from the beginning of the file.

        Raises:
            MemoryError: there is no room for the parts.
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
        """Fill ``buffer`` with the bytes from ``position`` on.

        Raises:
            EOFError: there are too few.
        """
        while len(buffer):
            count = os.preadv(self.handle, [buffer], position)
            if not count:
                raise EOFError("a mini-batch is truncated")
            buffer, position = buffer[count:], position + count


class Part(NamedTuple):
    """Where the skeleton or a tensor lies: ``size`` bytes of a file, from ``position`` on."""

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
    """Pickles tensors with their memory out of band; torch's own way would write it twice.

    Attributes:
        tensors: as flat bytes, in the order of their buffers.
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
    """A batch as its skeleton and parts; a queue needs an open file for each large tensor only."""

    head: bytes
    parts: tuple[bytes | Tensor, ...]


def pack(batch: Any) -> Packed:
    """Split a batch into its skeleton, copies of small tensors, and the large tensors."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = _Pickler(file, buffers.append)
    pickler.dump(batch)
    pairs = zip(pickler.tensors, buffers, strict=True)
    return Packed(
        file.getvalue(),
        tuple(
            tensor if tensor.numel() >= _LARGE_BYTES else bytes(buffer.raw())
            for tensor, buffer in pairs
        ),
    )


def encode(num_samples: int, batch: Any) -> Frame:
    """Copy a batch, or a packed one, into a frame.

    Raises:
        MemoryError: there is no room for the frame.
    """
    packed = batch if isinstance(batch, Packed) else pack(batch)
    written: list[bytes | memoryview] = [packed.head]
    parts, files, position = [Part(0, 0, len(packed.head))], [Memory.new()], len(packed.head)
    for part in packed.parts:
        if isinstance(part, Tensor):
            shared = _memory_of(part) if len(files) < _MOST_FILES else None
            if shared is not None:
                parts.append(Part(len(files), shared[1], part.numel()))
                files.append(shared[0])
                continue
        memory: Any = part.numpy() if isinstance(part, Tensor) else part
        written.append(memoryview(memory))
        parts.append(Part(0, position, len(written[-1])))
        position += len(written[-1])
    files[0].write(written)
    return Frame(num_samples, tuple(parts), tuple(files))


def _memory_of(tensor: Tensor) -> tuple[Memory, int] | None:
    """The file in which a loader worker has put the tensor, and its offset; None: there is none."""
    storage: Any = tensor.untyped_storage()
    has_handles = get_sharing_strategy() == "file_descriptor"
    if not (has_handles and storage.is_shared()):
        return None
    handle, _ = storage._share_fd_cpu_()  # the file's own handle, as torch's queues pass it
    return Memory(os.dup(handle)), int(tensor.storage_offset())


def decode(frame: Frame) -> Any:
    """A new copy of the batch in memory of torch's own, so that sums come out as in the reader.

    Raises:
        EOFError: the frame is truncated.
    """
    buffers = []
    for part in frame.parts:
        memory: Any = torch.empty(part.size, dtype=torch.uint8).numpy()
        buffers.append(memoryview(memory))
        frame.files[part.file].read_into(buffers[-1], part.position)
    head, *tensors = buffers
    return pickle.loads(head, buffers=tensors)
