"""The time an exchange adds to steps of 10 ms if later steps may hide it."""

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.predict.simulation import World, forecast
from paceline.simulation.agenda import Agenda

UPDATES = 200
WORLD = World(delay=("10ms",), link="1ms,100MB/s", num_bytes="1MB")
"""A push takes 11 ms, and so does a pull."""


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize(
    ("protocol", "update_s"),
    [
        ("local-sgd:8+fragments:4", 0.042),  # two steps, and 22 ms
        ("local-sgd:8+fragments:4,1", 0.032),  # 22 ms from the boundary on, and the second step
        ("local-sgd:8+fragments:2,3", 0.040),  # hidden: four steps
        ("local-sgd:4+fragments:1,2", 0.042),  # two steps hide 20 ms of it
    ],
)
def test_exchange_adds_only_the_time_steps_do_not_hide(
    tmp_path: Path, protocol: str, update_s: float, is_traced: bool
) -> None:
    run_dir = tmp_path / "run" if is_traced else None
    predicted = forecast(protocol, 4, WORLD, UPDATES, run_dir=run_dir)
    assert predicted.time_per_update_s == pytest.approx(update_s, rel=0.01)


@pytest.mark.parametrize("is_traced", [False, True])
def test_abandoned_work_delays_no_update(tmp_path: Path, is_traced: bool) -> None:
    """Worker 3 would have needed 80 s for the work it abandons after one."""
    world = World(
        delay=("10ms",), slow=("3=1000x",), away=("3=1s..",), link="1ms,100MB/s", num_bytes="1MB"
    )
    run_dir = tmp_path / "run" if is_traced else None
    predicted = forecast("local-sgd:8+fragments:1,2", 4, world, 20, run_dir=run_dir)
    assert predicted.time_per_update_s < 1.0


def test_overlap_with_a_measured_exchange_is_refused() -> None:
    conditions = WORLD.conditions(2)
    object.__setattr__(conditions, "machine", object())
    with pytest.raises(ConfigError, match="--overlap 1 with --like and --link"):
        Agenda(conditions, 1)


def test_overlap_without_effect_is_noted() -> None:
    predicted = forecast("local-sgd:4+fragments:1,2", 4, World(delay=("10ms",)), 10)
    assert (
        predicted.note
        == "an overlap of 2 steps changes no time: without --link an exchange takes no time"
    )
    assert forecast("local-sgd:4+fragments:1,2", 4, WORLD, 10).note == ""
    assert forecast("local-sgd:4+fragments:2", 4, World(delay=("10ms",)), 10).note == ""
