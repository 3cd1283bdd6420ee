"""Slow phases: the long-run pace holds, and called-off steps change nothing."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.conditions.slowness import PhasePace, Phases, parse_phases
from paceline.errors import ConfigError

PHASES = Phases(factor=4.0, fast_s=3.0, slow_s=1.0)


def test_work_advances_at_the_long_run_pace() -> None:
    pace = PhasePace(PHASES, random.Random(1))
    at_s = 0.0
    for _ in range(20_000):
        at_s = pace.finish_s(at_s, 0.5)
    assert 20_000 * 0.5 / at_s == pytest.approx(PHASES.pace, rel=0.02)
    assert PHASES.pace == pytest.approx(0.75 + 0.25 / 4)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans()), max_size=30), st.integers(0, 50))
def test_a_called_off_step_changes_no_phase(steps: list[tuple[float, bool]], seed: int) -> None:
    """One worker looks far ahead and is called off at once, the other never looks."""
    pace, undisturbed = (PhasePace(PHASES, random.Random(seed)) for _ in range(2))
    at_s = 0.0
    for work_s, looks in steps:
        if looks:
            pace.finish_s(at_s, 100.0)
        end_s = pace.finish_s(at_s, work_s)
        assert end_s == undisturbed.finish_s(at_s, work_s)
        assert at_s + work_s <= end_s + 1e-9 <= at_s + 4 * work_s + 2e-9
        at_s = end_s


def test_a_step_is_slow_only_inside_a_slow_phase() -> None:
    pace = PhasePace(PHASES, random.Random(2))
    change_s = pace._changes_s[0]
    end_s = pace.finish_s(change_s - 0.1, 0.1 + 0.01)
    assert end_s == pytest.approx(change_s + 0.04)


def test_phases_are_read_for_one_and_for_all_workers() -> None:
    result = parse_phases(["*=2x@60s/10s"], 3)
    assert result == dict.fromkeys(range(3), Phases(factor=2.0, fast_s=60.0, slow_s=10.0))
    assert list(parse_phases(["1=2@1s/500ms"], 3)) == [1]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1=5x@60s", "must read WORKER=FACTORx@FAST/SLOW"),
        ("5x@60s/10s", "must read WORKER=FACTORx@FAST/SLOW"),
        ("1=5x@60/10s", "'60' has no unit"),
        ("1=5x@0s/10s", "both phases must be > 0 s"),
        ("1=0.5x@1s/1s", "must be >= 1 and finite"),
        ("7=5x@1s/1s", "there is no worker 7"),
    ],
)
def test_an_invalid_phase_is_refused_by_name(value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_phases([value], 3)


def test_a_worker_has_at_most_one_kind_of_phases() -> None:
    with pytest.raises(ConfigError, match="worker 1 has one already"):
        parse_phases(["*=2x@1s/1s", "1=3x@1s/1s"], 2)
