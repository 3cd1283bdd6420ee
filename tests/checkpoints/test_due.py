"""When a checkpoint is due."""

import pytest

from paceline.checkpoints.due import Due, Every, parse_every
from paceline.errors import ConfigError


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
def test_what_can_be_asked_for(text: str, value: float, unit: str) -> None:
    every = parse_every(text)
    assert (every.value, every.unit) == (value, unit)


@pytest.mark.parametrize("text", ["", "30", "s", "-3s", "0 updates", "1.5 epochs", "30s 2min", "x"])
def test_all_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_every"):
        parse_every(text)


def test_by_updates() -> None:
    due = Due(parse_every("10 updates"), 0.0, 5, 0)
    assert not due.by_step(1e9, 14)
    assert due.by_step(0.0, 15)
    assert due.by_epoch(0.0, 15, 0)
    due.taken(0.0, 15, 0)
    assert not due.by_step(0.0, 24)


def test_by_epochs_never_inside_one() -> None:
    due = Due(parse_every("2 epochs"), 0.0, 0, 3)
    assert not due.by_step(1e9, 10**9)
    assert not due.by_epoch(0.0, 1, 4)
    assert due.by_epoch(0.0, 1, 5)


def test_by_the_clock_and_only_when_something_is_new() -> None:
    due = Due(parse_every("30s"), 100.0, 7, 0)
    assert not due.by_step(129.0, 8)
    assert not due.by_step(131.0, 7)
    assert due.by_step(131.0, 8)


def test_a_slow_disk_is_asked_less_often() -> None:
    due = Due(parse_every("30s"), 0.0, 0, 0)
    due.wrote(12.0)
    assert not due.by_step(119.0, 9)
    assert due.by_step(121.0, 9)


def test_never_is_never() -> None:
    due = Due(Every(value=0.0, unit="never"), 0.0, 0, 0)
    assert not due.by_step(1e9, 10**9)
    assert not due.by_epoch(1e9, 10**9, 10**6)
