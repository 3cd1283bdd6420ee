"""The end of a run, and its checkpoints, when the worker that makes them dies."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from dying import Fault, with_fault
from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.resumption import RUN
from reference import differ, plain_loop
from runs import train
from tiny import TASK, samples

CLOSE = 1e-6
PINS = "before it pins a version"
LONG = replace(TASK, data=functools.partial(samples, 240), epochs=2)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("point", ["before it publishes", "before it adds to the sum"])
def test_another_worker_makes_the_last_update_when_one_dies(tmp_path: Path, point: str) -> None:
    """The run stops at that version, and all workers wait for it."""
    task = with_fault(TASK, Fault(point=point, call=5))
    run = train(task, tmp_path, workers=2, path="store", delay=("1=60ms",), updates=5)
    assert point in (run.folder / "logs" / "worker-1.log").read_text()
    assert differ(run.state, plain_loop(replace(TASK, epochs=1))) < CLOSE


@pytest.mark.timeout(40)
def test_a_checkpoint_that_no_worker_pinned_is_not_awaited(tmp_path: Path) -> None:
    """Worker 0 pins it after reporting the round; here the others report first and continue."""
    death = Fault(worker=0, point="before it tells of rounds", call=2)
    settings = {"workers": 3, "path": "peers", "delay": ("30ms",), "checkpoint_every": "1 updates"}
    run = train(with_fault(LONG, death), tmp_path, **settings)
    assert run.left == ["killed by signal 9"]
    assert run.notes == ["peers go on through the store"]
    assert list((run.folder / "checkpoints").iterdir())
    assert differ(run.state, plain_loop(LONG)) < CLOSE


@pytest.mark.timeout(40)
@pytest.mark.parametrize("path", ["store", "peers"])
@pytest.mark.parametrize("updates", [5, None])
def test_another_worker_copies_the_end_when_the_assigned_one_dies(
    tmp_path: Path, path: str, updates: int | None
) -> None:
    """Inside an epoch, where the run stops, and after the last, where all workers end."""
    task = with_fault(TASK, *(Fault(worker=worker, point=PINS, call=1) for worker in (0, 1)))
    run = train(task, tmp_path, workers=3, path=path, updates=updates)
    for worker in (0, 1):
        assert f"it dies {PINS}" in (run.folder / "logs" / f"worker-{worker}.log").read_text()
    checkpoint = CheckpointFolder(run.folder / "checkpoints").newest()
    assert checkpoint.json(RUN)["version"] == run.summary.updates
    if updates is None:
        assert differ(run.state, plain_loop(TASK)) < CLOSE
