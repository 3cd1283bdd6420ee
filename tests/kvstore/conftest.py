"""A store that is closed after the test."""

from collections.abc import Iterator

import pytest

from paceline import KVStore


@pytest.fixture
def store() -> Iterator[KVStore]:
    with KVStore(num_shards=4, capacity_bytes=2**28) as one:
        yield one
