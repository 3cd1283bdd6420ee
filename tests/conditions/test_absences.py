"""Absences of workers: spellings and their meaning, and refusals of invalid ones."""

import math

import pytest

from paceline.conditions.world import Absence, parse_absences
from paceline.errors import ConfigError


def test_a_late_start_a_pause_and_an_end_are_read() -> None:
    result = parse_absences(["2=60s..", "1=..10s", "1=20s..30s"], 3)
    assert result == (
        Absence(worker=1, from_s=0.0, until_s=10.0),
        Absence(worker=1, from_s=20.0, until_s=30.0),
        Absence(worker=2, from_s=60.0, until_s=math.inf),
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["1"], "must read WORKER=FROM..UNTIL, got '1'"),
        (["1=.."], "must read WORKER=FROM..UNTIL"),
        (["1=10s"], "must read WORKER=FROM..UNTIL"),
        (["1=10..20s"], "'10' has no unit"),
        (["1=20s..10s"], "ends before it begins"),
        (["1=-5s..10s"], "must be >= 0"),
        (["9=1s..2s"], "there is no worker 9"),
        (["1=1s..5s", "1=4s..9s"], "away from 1s to 5s and again from 4s"),
        (["1=1s..", "1=4s..9s"], "away from 1s to infs and again"),
    ],
)
def test_an_invalid_absence_is_refused_by_name(values: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_absences(values, 3)
