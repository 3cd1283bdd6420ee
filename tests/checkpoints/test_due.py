"""When a checkpoint is due."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from paceline.checkpoints.due import Due, Every, parse_every
from paceline.checkpoints.writer import WriteQueue
from paceline.errors import ConfigError
from paceline.run.checkpointing import Checkpointing, _Draft
from paceline.wire.messages import Copied


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("30s", 30.0, "s"),
        ("1.5 min", 90.0, "s"),
        ("2h", 7200.0, "s"),
        ("500 updates", 500.0, "updates"),
        ("1update", 1.0, "updates"),
        ("1 epoch", 1.0, "epochs"),
        ("never", 0.0, "never"),
    ],
)
def test_a_valid_interval_is_parsed(text: str, value: float, unit: str) -> None:
    every = parse_every(text)
    assert (every.value, every.unit) == (value, unit)


@pytest.mark.parametrize(
    "text", ["", "30", "s", "-3s", "0 updates", "1.5 epochs", "30s 2min", "x", f"{10**400} updates"]
)
def test_other_intervals_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_every"):
        parse_every(text)


def test_checkpoints_are_due_by_updates() -> None:
    due = Due(parse_every("10 updates"), 0.0, 5, 0)
    assert not due.by_step(1e9, 14)
    assert due.by_step(0.0, 15)
    assert due.by_epoch(0.0, 15, 0)
    due.taken(0.0, 15, 0)
    assert not due.by_step(0.0, 24)


def test_checkpoints_by_epochs_are_never_due_inside_one() -> None:
    due = Due(parse_every("2 epochs"), 0.0, 0, 3)
    assert not due.by_step(1e9, 10**9)
    assert not due.by_epoch(0.0, 1, 4)
    assert due.by_epoch(0.0, 1, 5)


def test_checkpoints_are_due_by_time_only_after_a_new_update() -> None:
    due = Due(parse_every("30s"), 100.0, 7, 0)
    assert not due.by_step(129.0, 8)
    assert not due.by_step(131.0, 7)
    assert due.by_step(131.0, 8)


def test_a_slow_disk_makes_checkpoints_rarer() -> None:
    due = Due(parse_every("30s"), 0.0, 0, 0)
    due.wrote(12.0)
    assert not due.by_step(119.0, 9)
    assert due.by_step(121.0, 9)


def test_checkpoints_with_never_are_never_due() -> None:
    due = Due(Every(value=0.0, unit="never"), 0.0, 0, 0)
    assert not due.by_step(1e9, 10**9)
    assert not due.by_epoch(1e9, 10**9, 10**6)


def test_time_that_the_run_waited_counts_as_writing_time() -> None:
    """For a split model, which one member writes while all others wait."""
    made = Checkpointing.__new__(Checkpointing)
    made._due = Due(parse_every("1s"), 0.0, 0, 0)
    made._draft = _Draft(number=1, aside=Path())
    made.copied(0, Copied(1, 3, True, "", 2.0))
    made._queue = cast(
        WriteQueue, SimpleNamespace(answers=lambda: [{"sealed": "1", "took_s": 1.0}], is_busy=True)
    )
    made._hear_queue()
    assert not made._due.by_step(29.0, 3)
    assert made._due.by_step(31.0, 3)
