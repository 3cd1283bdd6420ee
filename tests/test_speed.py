"""The speed settings of a worker and the outcome of a trial survive a file."""

import json

import pytest

from paceline.speed import Finding, Outcome, Speed

OUTCOME = Outcome(
    speed=Speed(threads=2, compile="default"),
    findings=(
        Finding(name="compile", what="compile default", gain=1.5, is_kept=True, once_s=14.0),
        Finding(name="threads", what="4 threads", gain=0.9, reason="two cores"),
    ),
    before_s=0.042,
    after_s=0.028,
    num_samples=128,
    batch_size=256,
    took_s=9.0,
)


def test_outcome_survives_json() -> None:
    assert Outcome.read(json.loads(json.dumps(OUTCOME.write()))) == OUTCOME


@pytest.mark.parametrize("wrong", [{"before_s": 0.0}, {"num_samples": 0}, {"took_s": "9"}])
def test_invalid_outcome_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Outcome.read({**json.loads(json.dumps(OUTCOME.write())), **wrong})


def test_lines_say_what_helped_and_the_total_speedup() -> None:
    assert OUTCOME.lines() == [
        "fast: compile default 1.50x (14 s once, repaid after 500 steps); together 1.50x, "
        "42.0 -> 28.0 ms a step, on 128 of 256 samples",
        "fast: not kept: 4 threads 0.90x (two cores)",
    ]


def test_having_changes_one_field_and_keeps_the_rest() -> None:
    speed = OUTCOME.speed.having("ahead", True)
    assert speed == Speed(threads=2, compile="default", ahead=True)
    assert speed.is_chosen("ahead")
    assert not speed.is_chosen("precision")
