"""Memory that is given back is the machine's again, and its neighbours keep what they hold."""

import mmap

import pytest

from paceline.store.memory import SharedMemory

SIZE = 1 << 20


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="pages cannot be given back here")
def test_pages_that_are_given_back_are_not_used_any_more() -> None:
    memory = SharedMemory.create(SIZE)
    memory.buffer[:] = b"\1" * SIZE
    assert memory.used_bytes() == SIZE
    memory.release(5000, SIZE)
    assert memory.used_bytes() == 2 * mmap.PAGESIZE
    assert memory.buffer[4999] == memory.buffer[5000] == 1
    assert memory.buffer[2 * mmap.PAGESIZE] == 0
    memory.buffer[SIZE - 1] = 7
    assert memory.buffer[SIZE - 1] == 7
