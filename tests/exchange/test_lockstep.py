"""The stage of members in a joint step, read from the lines that they show."""

import math

import pytest

from paceline.errors import ConfigError
from paceline.exchange.base import Superseded
from paceline.exchange.lockstep import Stage, _refuse_elsewhere, stage_of
from paceline.exchange.rounds import Line

STEP_OF_SECOND = 8.0
"""The stage of a step of optimizer 1 is so much more than that of optimizer 0."""


def line(stage: float) -> Line:
    """The line of a member with two samples."""
    return Line(
        num_samples=0.0, weight=2.0, loss=0.5, fault=0.0, compute_s=0.0, wait_s=0.0, push_s=0.0,
        input_s=0.0, squared_norm=0.0, max_norm=math.inf, max_value=math.inf, hyper=7.0,
        bad_version=-1.0, leaves=0.0, snapshot=0.0, stage=stage,
    )  # fmt: skip


def test_a_member_without_a_mini_batch_reads_the_others_stage() -> None:
    lines = [line(stage=Stage.FOLLOWS), line(stage=STEP_OF_SECOND + Stage.ENTERS)]
    assert stage_of(lines) == (Stage.ENTERS, 1)
    assert stage_of([line(stage=Stage.FOLLOWS), line(stage=Stage.PUSHES)]) == (Stage.PUSHES, 0)
    _refuse_elsewhere(lines)


def test_members_at_one_stage_continue() -> None:
    for stage in (Stage.ENTERS, Stage.STEPS, Stage.CLIPS, Stage.EVALUATED):
        _refuse_elsewhere([line(stage=stage), line(stage=stage)])


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (Stage.EVALUATED, Stage.PUSHES, "worker 0 has called its closure once more .* worker 1 is"),
        (Stage.ENTERS, Stage.LEFT_LOOP, "worker 0 begins a step .* worker 1 has left its loop"),
        (Stage.CLIPS, Stage.EVALUATED, "worker 1 has called its closure .* worker 0 clips"),
        (Stage.STEPS, STEP_OF_SECOND + Stage.STEPS, "worker 1 .* of another optimizer"),
    ],
)
def test_members_at_different_stages_are_named(one: float, other: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _refuse_elsewhere([line(stage=one), line(stage=other)])


def test_a_step_is_called_off_when_a_member_left_at_a_stop() -> None:
    with pytest.raises(Superseded):
        _refuse_elsewhere([line(stage=Stage.EVALUATED), line(stage=Stage.LEFT)])
