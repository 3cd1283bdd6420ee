"""A race to a target: how many seeds it runs."""

from types import SimpleNamespace

import pytest

from paceline.conditions.delays import NO_DELAY, parse_delays
from paceline.conditions.world import Conditions
from paceline.predict import pursuit
from paceline.predict.pursuit import FEWEST_SEEDS, MOST_SEEDS, Goal, pursue
from paceline.predict.race import Racer, Training
from paceline.workloads import load_task


@pytest.mark.parametrize(("computed_s", "num_seeds"), [(0.0, MOST_SEEDS), (1.0, FEWEST_SEEDS)])
def test_the_budget_counts_computing_and_no_waiting(
    computed_s: float, num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long other processes keep it waiting, a race compares as much."""
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
