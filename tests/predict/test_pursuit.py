"""A race to a target: the number of seeds it runs."""

import math
from types import SimpleNamespace

import pytest

from paceline.conditions.delays import NO_DELAY, parse_delays
from paceline.conditions.world import Conditions
from paceline.predict import pursuit
from paceline.predict.pursuit import (
    FEWEST_SEEDS,
    MOST_SEEDS,
    Goal,
    is_clearly_behind,
    pursue,
)
from paceline.predict.race import Racer, Training
from paceline.report.ranking import Standing
from paceline.workloads import load_task


@pytest.mark.parametrize(("computed_s", "num_seeds"), [(0.0, MOST_SEEDS), (1.0, FEWEST_SEEDS)])
def test_budget_counts_computing_not_waiting(
    computed_s: float, num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race compares as much, however long other processes keep it waiting."""
    training = Training(task=load_task("quadratic", 2, None), mini_batch_size=4, lr=None, seed=0)
    delays = tuple(delay or NO_DELAY for delay in parse_delays(("10ms",), 2))
    conditions = Conditions(delays=delays)
    racer = Racer("full-sync", training, conditions)
    racer.advance(0.05)
    goal = Goal(loss=0.5 * racer.standing.loss)
    clock = SimpleNamespace(now_s=0.0)
    clock.thread_time = lambda: clock.now_s
    monkeypatch.setattr(pursuit, "time", clock)

    def say(text: str) -> None:
        clock.now_s += computed_s

    protocols = ("full-sync", "k-batch-sync:2")
    standings = pursue(protocols, training, conditions, goal, 2.5, say)
    assert [len(standing.target_s) for standing in standings] == [num_seeds, num_seeds]


@pytest.mark.parametrize(
    ("best_s", "other_s", "is_behind"),
    [
        ((5.1, 5.3, 10.3), (8.3, 6.9, 5.9), False),  # its median is low by chance
        ((5.7, 5.9, 6.9), (8.3, 7.6, 9.1), True),
        ((5.7, 5.9, 6.9), (6.3, 6.6, 7.1), False),  # never ahead, but close
        ((5.7, 5.9, 6.9, 9.5), (8.3, 7.6, 9.1, 8.8), True),
        ((5.7, 5.9, math.inf), (math.inf, math.inf, math.inf), False),
    ],
)
def test_finalist_leaves_when_more_seeds_would_not_help(
    best_s: tuple[float, ...], other_s: tuple[float, ...], is_behind: bool
) -> None:
    best, other = (
        Standing(protocol=name, virtual_s=1.0, loss=0.5, updates=1, target_s=times_s)
        for name, times_s in (("async", best_s), ("k-batch-async:2", other_s))
    )
    assert is_clearly_behind(other, best) is is_behind
