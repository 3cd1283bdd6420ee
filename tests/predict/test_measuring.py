"""What a crowd on few cores costs: a run's pace against what the simulator makes of a profile."""

from pathlib import Path

import pytest

from paceline.compute.cores import num_cores
from paceline.events import Apply, EpochEnd, Ticket
from paceline.predict.advice import Question, advise
from paceline.predict.measuring import crowding, most_crowded
from paceline.predict.profiles import Profile
from paceline.report.ranking import render_advice
from paceline.trace import FILE_NAME, Trace

WORK_S = 0.010
ALONE = Profile(
    run_dir=Path("profile"), task="made up", mini_batch_size=4, num_parameters=5,
    work_s={0: (WORK_S,), 1: (WORK_S,)}, exchange_s={0: (0.0,), 1: (0.0,)}, add_s=0.0, apply_s=0.0,
    delay=(), slow=(), cores=2,
)  # fmt: skip


def live(folder: Path, update_s: float, num_updates: int = 100) -> Path:
    """A run with an update ever ``update_s``, and a long rest between its two epochs."""
    trace, t_s = Trace(folder / FILE_NAME), 0.0
    trace.header(task="made up")
    for number in range(num_updates):
        t_s += update_s
        trace.order(Apply((Ticket(0, number, number),), (1.0,)), t_s)
        if number == num_updates // 2:
            trace.order(EpochEnd(0, number), t_s)
            t_s += 50.0
    trace.close()
    return folder


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_it_is_the_pace_over_the_simulated_one(tmp_path: Path, factor: float) -> None:
    """Two cores make two pushes in 10 ms, which is one update of k-batch-async:2."""
    place = live(tmp_path, factor * WORK_S)
    assert crowding(place, ALONE, workers=8, cores=2) == pytest.approx(factor, rel=0.02)


def test_a_few_updates_tell_nothing(tmp_path: Path) -> None:
    assert crowding(live(tmp_path, WORK_S, num_updates=20), ALONE, workers=8, cores=2) is None


def test_the_machine_is_stretched_by_it() -> None:
    one = ALONE.machine(8, 2, 1.5)
    assert [term.mean_s for delay in one.work for term in delay.terms] == [1.5 * WORK_S] * 8


def test_hundreds_of_workers_are_not_started_to_measure_a_crowd() -> None:
    assert (most_crowded(500, 2), most_crowded(3, 2)) == (8, 3)


def test_plan_measures_it_where_workers_share_the_cores_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    cores = num_cores()
    asked = Question(
        task="quadratic", workers=max(2, cores) + 1, cores=cores, profile_s=2.0, race_s=0.5,
        protocols=("full-sync", "async"),
    )  # fmt: skip
    advice = advise(asked, said.append)
    assert any(line.startswith("a crowd: ") for line in said)
    assert advice.crowding is not None
    assert advice.crowding > 0.2
    assert any(line.startswith("crowd: ") for line in render_advice(advice))
    assert advice.to_json()["crowding"] == advice.crowding
