"""A mini-batch as bytes that outlive who read it: a file without a name, in memory.

    skeleton (pickle) | tensor | tensor | ...        one file each; whoever has it open keeps it

Who asks for a mini-batch is handed the open file and reads it by itself, so giving it takes no time
of who made it, however large it is, and nothing is lost where that one is killed. This module must
not know streams.

Source: PEP 574, "Pickle protocol 5 with out-of-band data"; memfd_create(2).
"""

import io
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


@dataclass(frozen=True, slots=True)
class Frame:
    """One mini-batch.

    Attributes:
        sizes: bytes of the skeleton and of each tensor, as they lie in ``memory``.
    """

    num_samples: int
    sizes: tuple[int, ...]
    memory: Memory


class _Pickler(pickle.Pickler):
    """Tensors leave their memory aside: torch's own way would write it twice."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        if value.requires_grad or value.device.type != "cpu" or value.is_conj() or value.is_neg():
            return NotImplemented
        flat: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(flat), value.dtype, tuple(value.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    flat = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0)
    return flat.view(dtype).view(shape) if len(buffer) else torch.empty(shape, dtype=dtype)


def encode(num_samples: int, batch: Any) -> Frame:
    """A copy of what stands in a batch.

    Raises:
        MemoryError: there is no room for it.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(batch)
    parts: list[Any] = [file.getvalue(), *(one.raw() for one in buffers)]
    memory = Memory.new()
    memory.write(parts)
    return Frame(num_samples, tuple(len(one) for one in parts), memory)


def decode(frame: Frame) -> Any:
    """The batch, each time anew, in memory of torch's own: sums come out as in the reader's.

    Raises:
        EOFError: the frame is cut short.
    """
    buffers, position = [], 0
    for size in frame.sizes:
        memory: Any = torch.empty(size, dtype=torch.uint8).numpy()
        buffers.append(memoryview(memory))
        frame.memory.read_into(buffers[-1], position)
        position += size
    head, *others = buffers
    return pickle.loads(head, buffers=others)
