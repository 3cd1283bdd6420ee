"""One thread a test process, and a store that is closed again."""

from collections.abc import Iterator

import pytest
import torch

from paceline import KVStore


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def store() -> Iterator[KVStore]:
    with KVStore(num_shards=4, capacity_bytes=2**28) as one:
        yield one
