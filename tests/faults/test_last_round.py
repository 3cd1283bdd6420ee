"""Between peers: a death in the last round of an epoch leaves no worker waiting.

Of 241 samples in batches of 48 the last batch has one: it is worker 0's, the others have none.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dying import Fault, with_fault
from reference import differ, plain_loop
from runs import Run, assert_each_sample_once, train
from tiny import TASK, samples

CLOSE = 1e-6
NUM_SAMPLES, BATCH, EPOCHS = 241, 48, 2
ROUNDS = 6
SHORT = replace(TASK, data=functools.partial(samples, NUM_SAMPLES), batch_size=BATCH)


@functools.cache
def without_faults() -> Any:
    return plain_loop(SHORT)


def _train(folder: Path, *faults: Fault, **settings: Any) -> Run:
    settings = {"workers": 4, "path": "peers", **settings}
    run = train(with_fault(SHORT, *faults), folder, **settings)
    assert run.left == ["killed by signal 9"]
    assert run.num_epochs_ended() == EPOCHS
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    return run


@pytest.mark.timeout(40)
@pytest.mark.parametrize("barrier", [1, 2])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_worker_that_leaves_late_takes_no_update_back(
    tmp_path: Path, barrier: int, late: int
) -> None:
    """Worker 3 dies; worker 0 switches to the store while another is still leaving."""
    death = Fault(worker=3, point="before it reaches a barrier", call=2 * (ROUNDS - 1) + barrier)
    late_one = Fault(worker=late, point="while it leaves its peers", call=1, late_s=0.5)
    run = _train(tmp_path, death, late_one)
    assert differ(run.state, without_faults()) < CLOSE


@pytest.mark.timeout(40)
@pytest.mark.parametrize("worker", [0, 3])
def test_the_last_version_stands_after_a_death_behind_the_last_barrier(
    tmp_path: Path, worker: int
) -> None:
    death = Fault(worker=worker, point="after its last barrier", call=ROUNDS)
    run = _train(tmp_path, death)
    assert differ(run.state, without_faults()) < CLOSE
