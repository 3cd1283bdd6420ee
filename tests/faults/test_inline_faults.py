"""The same plan inline: one process, and members that die, stall and come back."""

from pathlib import Path

import pytest

from paceline.errors import WorkerError
from paceline.events import Late, Stalled
from paceline.trace.records import Heard, Struck
from reference import differ, plain_loop
from runs import Run, assert_each_sample_once, train
from tiny import EPOCHS, NUM_SAMPLES, TASK

CLOSE = 1e-6


def inline(folder: Path, fault: str, protocol: str) -> Run:
    run = train(TASK, folder, workers=3, engine="inline", protocol=protocol, fault=(fault,))
    assert [record.text for record in run.records if isinstance(record, Struck)] == [fault]
    assert run.num_epochs_ended() == EPOCHS
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    return run


@pytest.mark.parametrize("worker", [0, 2])
@pytest.mark.parametrize(
    "fault", ["kill worker {} at update 3", "stop worker {} at update 3 for 9s"]
)
def test_full_sync_ends_as_without_the_fault(tmp_path: Path, fault: str, worker: int) -> None:
    run = inline(tmp_path, fault.format(worker), "full-sync")
    ended = [record.reason for record in run.records if isinstance(record, Heard) and record.reason]
    assert ended[0] in ("killed by signal 9", "replaced after a stall")
    assert differ(run.state, plain_loop(TASK)) < CLOSE


@pytest.mark.parametrize("protocol", ["k-sync:2", "k-batch-async:2", "async", "local-sgd:2"])
@pytest.mark.parametrize("fault", ["kill worker 1 at step 3", "stop worker 1 at step 3 for 9s"])
def test_every_sample_counts_once(tmp_path: Path, protocol: str, fault: str) -> None:
    inline(tmp_path, fault, protocol)


def test_a_replaced_worker_ends_quietly_when_it_returns(tmp_path: Path) -> None:
    run = inline(tmp_path, "stop worker 1 at update 3 for 9s", "full-sync")
    stalled = [record.fact for record in run.records if isinstance(record, Heard)]
    assert [type(fact) for fact in stalled].count(Stalled) == 1
    last = max(push.at_s for push in run.pushes if push.ticket.member == 1)
    assert last < next(fact.at_s for fact in stalled if isinstance(fact, Stalled))
    assert not any(isinstance(order, Late) for order in run.every_order())


def test_an_exception_in_a_worker_is_raised(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="injected fault"):
        train(TASK, tmp_path, workers=2, engine="inline", fault=("raise in worker 1 at step 2",))
