"""Through the store: a respawned worker writes to its seat's slot once its content is unneeded."""

from pathlib import Path

from dying import Fault, with_fault
from reference import differ, replay
from runs import assert_each_sample_once, train
from tiny import EPOCHS, NUM_SAMPLES, TASK

CLOSE = 1e-9


def test_a_respawned_worker_does_not_overwrite_the_dead_ones_push(tmp_path: Path) -> None:
    """Worker 1 dies with its push reported and not yet added; its inheritor is busy.

    Meanwhile the new worker 1 could push several times, from the same slot.
    """
    faults = (
        Fault(worker=1, point="before it adds to the sum", call=2),
        Fault(worker=0, call=2, late_s=3.0),
    )
    settings = {"workers": 2, "protocol": "k-batch-async:2", "respawn": True}
    run = train(with_fault(TASK, *faults), tmp_path, **settings)
    assert run.left == ["killed by signal 9"]
    assert run.summary.per_worker[1].members == 2
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, replay(TASK, run.records)) < CLOSE
