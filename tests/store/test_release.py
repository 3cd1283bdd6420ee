"""Released memory returns to the machine, and neighbouring memory is unchanged."""

import mmap
import os

import pytest

from paceline.store.memory import SharedMemory

SIZE = 1 << 20


REMOVES = pytest.mark.skipif(
    not hasattr(mmap, "MADV_REMOVE"), reason="pages cannot be given back here"
)


@REMOVES
def test_released_pages_are_no_longer_used() -> None:
    memory = SharedMemory.create(SIZE)
    memory.buffer[:] = b"\1" * SIZE
    assert memory.used_bytes() == SIZE
    memory.release(5000, SIZE)
    assert memory.used_bytes() == 2 * mmap.PAGESIZE
    assert memory.buffer[4999] == memory.buffer[5000] == 1
    assert memory.buffer[2 * mmap.PAGESIZE] == 0
    memory.buffer[SIZE - 1] = 7
    assert memory.buffer[SIZE - 1] == 7


@REMOVES
def test_cleared_memory_keeps_its_size_and_reads_as_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two trials a thread of the script may still read the gradients of the last."""
    memory = SharedMemory.create(SIZE + 100)
    other = SharedMemory(os.dup(memory.fd))
    other.buffer[:] = b"\1" * (SIZE + 100)
    monkeypatch.delattr(os, "ftruncate")  # a reader is killed while there is no size
    memory.clear()
    assert memory.used_bytes() == 0  # before it is read, which takes pages of zeros
    assert other.buffer[:] == bytes(SIZE + 100)
    assert memory.num_bytes == SIZE + 100
