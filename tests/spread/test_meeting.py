"""The next action of workers of a split model is decided from where all of them are."""

import pytest

from paceline.errors import ConfigError
from paceline.exchange.base import End as EndOf
from paceline.spread.meeting import Intent, PartTask, decide, mode_of

FORWARD, LOOK, BACKWARD, END, TRAIN = (
    Intent(one, -1, 4, 4, 1)
    for one in (
        PartTask.FORWARD, PartTask.LOOK, PartTask.BACKWARD, PartTask.STEP_END, PartTask.TRAIN,
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("every", "doing"),
    [
        ([FORWARD, FORWARD], PartTask.FORWARD),
        ([FORWARD, END], PartTask.FORWARD),
        ([END, BACKWARD], PartTask.BACKWARD),
        ([END, END], PartTask.STEP_END),
        ([LOOK, FORWARD], PartTask.LOOK),
        ([END, LOOK, BACKWARD], PartTask.LOOK),
        ([TRAIN, END], PartTask.TRAIN),
        ([LOOK, TRAIN], PartTask.LOOK),
    ],
)
def test_workers_at_the_end_of_a_step_serve_the_others(
    every: list[Intent], doing: PartTask
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
        (
            [END._replace(number=EndOf.EVALUATION), END._replace(number=EndOf.EPOCH)],
            "worker 4 waits in pace.evaluate() where worker 6 begins an epoch",
        ),
    ],
)
def test_workers_doing_different_things_are_named(every: list[Intent], words: str) -> None:
    with pytest.raises(ConfigError, match="worker") as refused:
        decide(every, (4, 6))
    assert words in str(refused.value)


def test_mixed_modes_are_neither_training_nor_evaluation() -> None:
    assert mode_of([True, False]) not in (0, 1, mode_of([False, True]))
