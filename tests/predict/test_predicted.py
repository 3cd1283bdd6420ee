"""Predictions from the modules themselves: forecasts, contests, races, advice."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.conditions.delays import parse_delay
from paceline.conditions.world import Conditions
from paceline.config import resolve
from paceline.errors import ConfigError
from paceline.predict import race as race_module
from paceline.predict.advice import Question, advise, family
from paceline.predict.comparison import Contest
from paceline.predict.pursuit import Goal, Pursuer, pursue
from paceline.predict.race import Racer, Training, check_accuracy, count_wins, race, ranked
from paceline.predict.rehearsal import Unwatched, rehearse
from paceline.predict.simulation import World, forecast
from paceline.report.ranking import Standing
from tiny import TASK

EACH_S = World(delay=("1s",))
CONDITIONS = Conditions(delays=(parse_delay("exp:1s"),) * 3, slow={0: 50.0})
TRAINING = Training(task=TASK, mini_batch_size=4, lr=None, seed=0)


def standing(name: str) -> Standing:
    return Standing(protocol=name, virtual_s=1.0, loss=0.5, updates=3)


def test_equal_steps_are_forecast_exactly() -> None:
    predicted = forecast("full-sync", 4, EACH_S, 10)
    assert (predicted.updates, predicted.time_per_update_s, predicted.theory_time_s) == (
        10,
        1.0,
        1.0,
    )
    with pytest.raises(ConfigError, match="updates must be >= 1, got 0"):
        forecast("full-sync", 4, EACH_S, 0)


def test_rehearsal_writes_the_files_of_a_run(tmp_path: Path) -> None:
    settings = resolve({"workers": 2, "protocol": "full-sync", "epochs": 1}, env={}).settings
    result = rehearse(TASK, settings, EACH_S, tmp_path / "run")
    assert result.summary.updates == result.forecast.updates == 5
    assert {"trace.jsonl", "summary.json", "model.safetensors"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


class Evaluations(Unwatched):
    """Records the epochs of evaluations."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def evaluated(self, epoch: int, at_s: float, metrics: Mapping[str, float]) -> None:
        self.epochs.append(epoch)


@pytest.mark.parametrize(
    ("evaluations", "epochs"), [(1, [0, 1, 2]), (2, [0, 0, 0, 1, 1, 2, 2])], ids=["one", "two"]
)
def test_epoch_with_a_short_last_batch_is_evaluated_as_requested(
    tmp_path: Path, evaluations: int, epochs: list[int]
) -> None:
    """With two there is also one at the start, before training."""
    asked = {"workers": 1, "protocol": "full-sync", "epochs": 3, "batch_size": 16}
    heard = Evaluations()
    rehearse(TASK, resolve(asked, env={}).settings, EACH_S, tmp_path / "run", heard, evaluations)
    assert heard.epochs == epochs


def test_contest_is_checked_before_it_starts() -> None:
    settings = resolve({"workers": 2}, env={}).settings
    contest = Contest(
        task="quadratic", protocols=("async",), settings=settings, world=EACH_S, is_simulated=True
    )
    contest.check()
    with pytest.raises(ConfigError, match="async is given twice"):
        replace(contest, protocols=("async", "async")).check()


def test_protocol_waiting_for_a_straggler_loses_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fixed lap: after a longer one, as on a fast machine, async diverges here."""
    monkeypatch.setattr(race_module, "_first_lap_s", lambda field, share_s: 10.0)
    ranking = race(["full-sync", "async"], TRAINING, CONDITIONS, 0.2)
    assert [(one.protocol, one.rank) for one in ranking] == [("async", 1), ("full-sync", 2)]


def test_first_protocol_at_the_target_is_ranked_first() -> None:
    ranking = pursue(["full-sync", "async"], TRAINING, CONDITIONS, Goal(loss=10.0), 60.0)
    times_s = [one.to_target_s for one in ranking]
    assert times_s == sorted(times_s)
    assert times_s[0] < math.inf
    assert [one.rank for one in ranking] == [1, 2]


@pytest.mark.parametrize(("num", "rounds"), [(2, 1), (3, 1), (5, 2)])
def test_race_has_as_many_rounds_as_announced(
    monkeypatch: pytest.MonkeyPatch, num: int, rounds: int
) -> None:
    monkeypatch.setattr(race_module, "_first_lap_s", lambda field, share_s: 3.0)
    monkeypatch.setattr(race_module, "_race_again", lambda *given: None)
    names, messages = ["full-sync", "async", "k-sync:1", "k-sync:2", "k-async:2"], list[str]()
    race(names[:num], TRAINING, CONDITIONS, 0.2, messages.append)
    assert [one.partition(":")[0] for one in messages] == [
        f"round {number} of {rounds}" for number in range(1, rounds + 1)
    ]


def test_each_evaluation_is_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow updates are evaluated less often: four evaluations of one version smooth nothing."""
    seen: list[int] = []

    def look(contender: Racer) -> float:
        seen.append(contender.standing.updates)
        return 0.5

    monkeypatch.setattr(Racer, "accuracy", look)
    pursuer = Pursuer("full-sync", TRAINING, CONDITIONS, Goal(accuracy=0.4))
    for until_s in range(1, 4000):
        pursuer.advance(float(until_s))
    assert seen == [1, 2, 3, 4]
    assert pursuer.reached_s < math.inf


@pytest.mark.parametrize(
    ("pairs", "found"), [({"val_accuracy": (3.0, 4.0)}, 0.75), ({"acc": (0.0, 0.0)}, 0.0)]
)
def test_accuracy_is_found_under_any_name(
    pairs: dict[str, tuple[float, float]], found: float
) -> None:
    task = replace(TASK, metrics=lambda outputs, targets: {"loss": (2.0, 1.0), **pairs})
    check_accuracy(task, "give a loss")
    contender = Racer("full-sync", replace(TRAINING, task=task), CONDITIONS)
    contender.advance(1.0)
    assert contender.accuracy() == found


def test_wins_are_counted_seed_by_seed() -> None:
    pair = ranked([standing("a"), standing("b")])
    count_wins(pair, [[1.0, 2.0, 3.0], [2.0, 2.0, 1.0, 0.0]])
    assert [(one.rank, one.wins) for one in pair] == [(1, 1), (2, 1)]


def test_goal_is_either_accuracy_or_loss() -> None:
    assert Goal(accuracy=0.9).missing(0.5) == pytest.approx(0.4)
    assert Goal(loss=0.9).missing(0.5) == pytest.approx(-0.4)
    with pytest.raises(ConfigError, match="give one target"):
        Goal()
    with pytest.raises(ConfigError, match="give one target"):
        Goal(accuracy=0.9, loss=0.5)


def test_family_has_every_kind_and_one_worker_is_refused() -> None:
    names = family(4)
    assert {name.partition(":")[0] for name in names} == {
        "full-sync", "k-sync", "k-batch-sync", "k-async", "k-batch-async", "async",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="at least 2 workers, got --workers 1"):
        advise(Question(task="quadratic", workers=1))


def test_first_delays_are_named_and_the_others_counted() -> None:
    delays = tuple(f"{worker}={worker + 1}s" for worker in range(6))
    assert forecast("async", 6, World(delay=delays), 10).delay == "one of 1s, 2s, 3s, 4s and 2 more"
