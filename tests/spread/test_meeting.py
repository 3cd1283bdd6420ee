"""What workers of a split model do is decided from what all have come to."""

import pytest

from paceline.errors import ConfigError
from paceline.partition.names import SplitName, read_split
from paceline.spread.meeting import Doing, Intent, decide, mode_of

FORWARD, LOOK, BACKWARD, END = (
    Intent(one, -1, 4, 4, 1) for one in (Doing.FORWARD, Doing.LOOK, Doing.BACKWARD, Doing.STEP_END)
)


@pytest.mark.parametrize(
    ("every", "doing"),
    [
        ([FORWARD, FORWARD], Doing.FORWARD),
        ([FORWARD, END], Doing.FORWARD),
        ([END, BACKWARD], Doing.BACKWARD),
        ([END, END], Doing.STEP_END),
        ([LOOK, FORWARD], Doing.LOOK),
        ([END, LOOK, BACKWARD], Doing.LOOK),
    ],
)
def test_who_is_at_a_steps_end_serves_and_a_look_comes_first(
    every: list[Intent], doing: Doing
) -> None:
    assert decide(every, range(len(every))) is doing


@pytest.mark.parametrize(
    ("every", "words"),
    [
        ([FORWARD, BACKWARD], "worker 4 calls the model where worker 6 is in backward()"),
        (
            [BACKWARD._replace(number=0), BACKWARD._replace(number=1)],
            "worker 4 is in backward() of its call 0 where worker 6 of its call 1",
        ),
        ([FORWARD, FORWARD._replace(mode=0)], "another mode on worker 4 than on worker 6"),
    ],
)
def test_two_who_do_different_things_are_named(every: list[Intent], words: str) -> None:
    with pytest.raises(ConfigError, match="worker") as refused:
        decide(every, (4, 6))
    assert words in str(refused.value)


def test_a_mix_of_modes_is_neither_training_nor_evaluation() -> None:
    assert mode_of([True, False]) not in (0, 1, mode_of([False, True]))


@pytest.mark.parametrize(
    ("text", "workers", "found"),
    [
        ("network", 3, SplitName(3, 1)),
        ("network:2", 2, SplitName(2, 1)),
        ("2x2", 4, SplitName(2, 2)),
        ("data", 4, None),
        ("1x4", 4, None),
        ("network", 1, None),
    ],
)
def test_a_name_says_parts_and_copies(text: str, workers: int, found: SplitName | None) -> None:
    assert read_split(text, workers) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("network:3", "is for 3 workers, and there are 2"),
        ("2x2", "is for 4 workers, and there are 2"),
        ("shard", "can be priced"),
        ("layer", "can be priced"),
        ("pipeline", "unknown split 'pipeline'"),
        ("network:x", "unknown split"),
        ("0x2", "at least one part"),
    ],
)
def test_what_cannot_be_split_so_is_refused_with_what_can(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_split(text, 2)
    assert words in str(refused.value)


def test_copies_and_twins_are_all_workers_once() -> None:
    name = SplitName(2, 3)
    assert [name.copy_of(one) for one in (0, 3, 5)] == [(0, 1), (2, 3), (4, 5)]
    assert [name.twins_of(one) for one in (0, 3)] == [(0, 2, 4), (1, 3, 5)]
