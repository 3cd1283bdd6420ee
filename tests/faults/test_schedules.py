"""Learning rates of a run whose workers die and come back equal those of one without deaths."""

from pathlib import Path
from typing import Any

import pytest
import torch

import loops
import scheduled
from paceline.errors import WorkerError
from paceline.trace.records import Struck
from runs import Run, run_script

SCRIPT = Path(scheduled.__file__)
CLOSE = 1e-9
PATHS = pytest.mark.parametrize("path", ["store", "peers"])


def _faulty(case: str, folder: Path, fault: str, **settings: Any) -> tuple[Run, list[Any]]:
    """The run, and the results of the workers at its end."""
    settings = {"workers": 2, "protocol": "full-sync", "delay": ("15ms",), **settings}
    run = run_script(SCRIPT, folder, case, str(folder), fault=(fault,), **settings)
    assert [record.text for record in run.records if isinstance(record, Struck)] == [fault]
    return run, [torch.load(path) for path in folder.glob("result-*.pt")]


def _assert_as_plain(result: dict[str, Any], case: str) -> None:
    plain = scheduled.run(loops.Plain(), case)
    for name, value in plain["parameters"].items():
        assert float((value - result["parameters"][name]).abs().max()) < CLOSE
    assert result["last"][0] == pytest.approx(plain["last"][0], abs=CLOSE)
    assert result["momenta"] == pytest.approx(plain["momenta"], abs=CLOSE)


@PATHS
@pytest.mark.parametrize("at", [0, 14])
@pytest.mark.parametrize("case", ["each", "two rhythms"])
def test_a_survivor_that_steps_twice_an_update_counts_updates(
    tmp_path: Path, case: str, at: int, path: str
) -> None:
    _, (result,) = _faulty(case, tmp_path, f"kill worker 1 at update {at}", path=path)
    assert len(result["rates"]) > 30
    _assert_as_plain(result, case)


@PATHS
@pytest.mark.parametrize("case", ["each, before", "sequential", "chained", "one cycle", "closure"])
def test_a_newcomer_continues_the_others_schedule(tmp_path: Path, case: str, path: str) -> None:
    run, results = _faulty(case, tmp_path, "kill worker 1 at update 5", path=path, respawn=True)
    assert run.summary.per_worker[1].members == 2
    assert len(results) == 2
    for result in results:
        _assert_as_plain(result, case)


@PATHS
def test_a_rhythm_that_no_worker_has_any_more_is_refused_by_name(tmp_path: Path, path: str) -> None:
    with pytest.raises(WorkerError, match=r"worker 0 steps ExponentialLR .* is no longer in step"):
        _faulty("every fourth, first", tmp_path, "kill worker 1 at update 5", path=path)


@PATHS
def test_a_schedule_that_ended_before_the_death_is_unchanged(tmp_path: Path, path: str) -> None:
    _, (result,) = _faulty("warming up", tmp_path, "kill worker 1 at update 15", path=path)
    _assert_as_plain(result, "warming up")


@pytest.mark.parametrize("respawn", [True, False])
@pytest.mark.parametrize("protocol", ["local-sgd:4", "adaptive-local:4"])
def test_workers_that_step_by_themselves_may_have_different_rates(
    tmp_path: Path, protocol: str, respawn: bool
) -> None:
    """Parameters are averaged, not gradients: there is no conflict."""
    run, _ = _faulty(
        "each", tmp_path, "kill worker 1 at update 2", protocol=protocol, respawn=respawn
    )
    assert run.num_epochs_ended() == scheduled.EPOCHS
