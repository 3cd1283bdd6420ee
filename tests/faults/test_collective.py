"""A death where ``torch.distributed`` carries bytes: survived unless inside an all-reduce."""

from pathlib import Path

import pytest

from dying import Fault, with_fault
from paceline.errors import AllGone
from paceline.trace.records import Rerouted, Resumed
from reference import differ, plain_loop
from runs import assert_each_sample_once, train
from tiny import EPOCHS, NUM_SAMPLES, TASK

CLOSE = 1e-6
COLLECTIVE = {"workers": 3, "protocol": "full-sync", "path": "collective"}
INSIDE = Fault(point="inside an all-reduce", call=7)


@pytest.mark.timeout(60)
def test_after_a_death_in_a_step_others_take_its_mini_batch(tmp_path: Path) -> None:
    run = train(with_fault(TASK, Fault(call=4)), tmp_path, **COLLECTIVE)
    assert run.left == ["killed by signal 9"]
    assert run.notes == ["peers go on through the store"]
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, plain_loop(TASK)) < CLOSE


@pytest.mark.timeout(60)
def test_after_a_death_before_the_rendezvous_the_others_continue(tmp_path: Path) -> None:
    """Torch's own rendezvous would wait five minutes for it."""
    fault = Fault(point="before it meets the others", call=1)
    run = train(with_fault(TASK, fault), tmp_path, **COLLECTIVE)
    assert run.left == ["killed by signal 9"]
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, plain_loop(TASK)) < CLOSE


@pytest.mark.timeout(60)
def test_a_death_inside_an_all_reduce_ends_the_run_with_advice(tmp_path: Path) -> None:
    with pytest.raises(AllGone, match=r"died inside an all-reduce, .*--respawn to restart"):
        train(with_fault(TASK, INSIDE), tmp_path, **COLLECTIVE)


@pytest.mark.timeout(60)
def test_a_death_inside_an_all_reduce_restarts_a_run_with_respawn(tmp_path: Path) -> None:
    """Once: the armed worker dies at its seventh update; fewer are left after the checkpoint."""
    settings = {"respawn": True, "checkpoint_every": "2 updates", **COLLECTIVE}
    run = train(with_fault(TASK, INSIDE), tmp_path, **settings)
    assert len([record for record in run.records if isinstance(record, Resumed)]) == 1
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, plain_loop(TASK)) < CLOSE


@pytest.mark.timeout(60)
def test_a_death_inside_a_collective_schedule_ends_the_run_with_advice(tmp_path: Path) -> None:
    """Also for members that the dead one sends nothing to."""
    chosen = {"workers": 4, "protocol": "full-sync", "collective": "ring"}
    with pytest.raises(AllGone, match=r"died inside an all-reduce, .*--respawn to restart"):
        train(with_fault(TASK, INSIDE), tmp_path, **chosen)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2"])
def test_a_respawned_worker_gets_a_new_process_group(tmp_path: Path, protocol: str) -> None:
    """A process group that has lost a member is useless: the next epoch makes a new one."""
    run = train(
        TASK, tmp_path, epochs=10, workers=2, protocol=protocol, path="collective", respawn=True,
        delay=("60ms",), fault=("kill worker 1 at update 4", "kill worker 0 at update 16"),
    )  # fmt: skip
    paths = [record.path for record in run.records if isinstance(record, Rerouted)]
    assert paths == ["collective", "store", "collective", "store", "collective"]
    assert run.num_epochs_ended() == 10
    assert_each_sample_once(run, NUM_SAMPLES, 10)
