"""Names of ``--split`` and their numbers of workers."""

import pytest

from paceline.errors import ConfigError
from paceline.partition.names import SplitName, read_split


@pytest.mark.parametrize(
    ("text", "workers", "found"),
    [
        ("network", 3, SplitName(3, 1)),
        ("network:2", 2, SplitName(2, 1)),
        ("2x2", 4, SplitName(2, 2)),
        ("layer", 3, SplitName(3, 1, is_layer=True)),
        ("layer:2", 2, SplitName(2, 1, is_layer=True)),
        ("network:interleaved", 3, SplitName(3, 1, schedule="interleaved")),
        ("network:2:gpipe", 2, SplitName(2, 1, schedule="gpipe")),
        ("2x2:1f1b", 4, SplitName(2, 2, schedule="1f1b")),
        ("data", 4, None),
        ("none", 4, None),
        (" data ", 4, None),
        ("1x4", 4, None),
        ("shard", 3, SplitName(3, 1, 3)),
        ("shard:1", 2, SplitName(2, 1, 1)),
        ("shard-2", 2, SplitName(2, 1, 2)),
        ("network", 1, None),
    ],
)
def test_split_name_gives_parts_and_copies(
    text: str, workers: int, found: SplitName | None
) -> None:
    assert read_split(text, workers) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("network:3", "is for 3 workers, but there are 2"),
        ("2x2", "is for 4 workers, but there are 2"),
        ("shard:4", "write shard:1"),
        ("shard:", "write shard:1"),
        ("shard:33", "write shard:1"),
        ("layer:3", "write layer:2"),
        ("layer:x", "unknown split"),
        ("pipeline", "unknown split 'pipeline'"),
        ("network:x", "unknown split"),
        ("0x2", "at least one part"),
        ("2x1:2", "unknown split"),
        ("network:2:zigzag", "unknown split"),
        ("layer:1f1b", "1f1b is a schedule for parts of a pipeline"),
        ("shard:1f1b", "write shard:1"),
    ],
)
def test_invalid_split_is_refused_with_alternatives(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_split(text, 2)
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["network:2", "network:2:1f1b", "2x1:gpipe", "layer:2", "shard:1"])
def test_split_name_survives_a_round_trip(text: str) -> None:
    result = read_split(text, 2)
    assert read_split(str(result), 2) == result


def test_copies_and_twins_partition_the_workers() -> None:
    name = SplitName(2, 3)
    assert [name.copy_of(one) for one in (0, 3, 5)] == [(0, 1), (2, 3), (4, 5)]
    assert [name.twins_of(one) for one in (0, 3)] == [(0, 2, 4), (1, 3, 5)]
