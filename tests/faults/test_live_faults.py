"""Faults of real processes: the others finish, every sample counts once, and the fault fired.

Under full-sync the parameters are those of a run without the fault, to 1e-6 in float64.
"""

import functools
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import WorkerError
from paceline.trace.records import Heard, Struck
from reference import differ, plain_loop
from runs import Run, assert_each_sample_once, train
from tiny import NUM_SAMPLES, TASK, samples

CLOSE = 1e-6
EPOCHS = 6
LONG = replace(TASK, epochs=EPOCHS)
PATHS = pytest.mark.parametrize("path", ["store", "peers"])


@functools.cache
def without_faults() -> Any:
    """The result of a plain loop on the same task."""
    return plain_loop(LONG)


def faulty(folder: Path, *faults: str, **settings: Any) -> Run:
    """A run under ``faults``, each of which must have fired."""
    settings = {"workers": 3, "protocol": "full-sync", "delay": ("20ms",), **settings}
    run = train(LONG, folder, fault=faults, **settings)
    assert sorted(struck(run)) == sorted(faults)
    assert run.num_epochs_ended() == EPOCHS
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    return run


def struck(run: Run) -> list[str]:
    return [record.text for record in run.records if isinstance(record, Struck)]


def joined(run: Run) -> list[tuple[int, int | None]]:
    """(member, worker) of all that ever took part."""
    return [
        (record.fact.member, record.worker)
        for record in run.records
        if isinstance(record, Heard) and record.worker is not None
    ]


def reasons(run: Run) -> list[str]:
    """How members ended, in that order."""
    return [record.reason for record in run.records if isinstance(record, Heard) and record.reason]


def stalled(run: Run) -> list[int]:
    kind = "Stalled"
    heard = [record.fact for record in run.records if isinstance(record, Heard)]
    return [fact.member for fact in heard if type(fact).__name__ == kind]


@PATHS
def test_a_killed_worker_does_not_change_the_result(tmp_path: Path, path: str) -> None:
    run = faulty(tmp_path, "kill worker 1 at update 7", path=path)
    assert run.left == ["killed by signal 9"]
    assert differ(run.state, without_faults()) < CLOSE


@PATHS
def test_a_worker_killed_at_a_given_time_does_not_change_the_result(
    tmp_path: Path, path: str
) -> None:
    run = faulty(tmp_path, "kill worker 2 at 0.15s", path=path)
    assert run.left == ["killed by signal 9"]
    assert differ(run.state, without_faults()) < CLOSE


@PATHS
def test_a_stopped_worker_that_others_wait_for_is_given_up(tmp_path: Path, path: str) -> None:
    run = faulty(tmp_path, "stop worker 1 at update 7 for 60s", path=path)
    assert run.left == ["killed by signal 9"]
    assert stalled(run) == ([1] if path == "store" else [])
    assert any("worker 1 has not pushed" in text and "stopped" in text for text in run.notes)
    assert differ(run.state, without_faults()) < CLOSE


@PATHS
def test_a_lost_push_is_repeated_by_another_worker(tmp_path: Path, path: str) -> None:
    """Its worker waits for an answer that never comes and is given up after a while."""
    run = faulty(tmp_path, "drop push of worker 1 at update 7", path=path, stall_after=0.4)
    assert any("worker 1 has not pushed" in text for text in run.notes)
    assert differ(run.state, without_faults()) < CLOSE


@PATHS
def test_slow_phases_and_late_pushes_do_not_change_the_result(tmp_path: Path, path: str) -> None:
    faults = ("slow worker 0 at step 3 for 0.2s by 4x", "delay push of worker 2 at step 9 by 0.1s")
    run = faulty(tmp_path, *faults, path=path)
    assert run.left == []
    assert differ(run.state, without_faults()) < CLOSE


@PATHS
def test_an_exception_counts_as_a_death_with_on_worker_error_continue(
    tmp_path: Path, path: str
) -> None:
    fault = "raise in worker 0 at update 7"
    run = faulty(tmp_path, fault, path=path, on_worker_error="continue")
    assert reasons(run)[0] == "exit 1"
    assert differ(run.state, without_faults()) < CLOSE


def test_an_exception_ends_the_run_by_default(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="RuntimeError: injected fault: raise in worker 1"):
        train(LONG, tmp_path, workers=2, fault=("raise in worker 1 at update 7",))


def test_a_stop_goes_unnoticed_where_no_worker_waits(tmp_path: Path) -> None:
    """Under K < P the stopped worker later continues as the same member."""
    fault = "stop worker 1 at step 3 for 1.5s"
    task = replace(TASK, data=functools.partial(samples, 1200), epochs=1)
    settings = {"protocol": "k-batch-async:2", "workers": 3, "delay": ("30ms",)}
    run = train(task, tmp_path, fault=(fault,), **settings)
    assert struck(run) == [fault]
    assert run.left == []
    assert len(joined(run)) == 3
    assert stalled(run) == [1]
    assert any("nobody waits for it: it is left alone" in text for text in run.notes)
    pushes = [push for push in run.pushes if push.ticket.member == 1]
    assert len(pushes) > 10
    gaps = [after.at_s - before.at_s for before, after in pairwise(pushes)]
    assert max(gaps) > 1.0
    assert_each_sample_once(run, 1200, 1)


@PATHS
def test_a_new_worker_replaces_a_dead_one(tmp_path: Path, path: str) -> None:
    run = faulty(tmp_path, "kill worker 0 at update 4", path=path, respawn=True, delay=("60ms",))
    assert joined(run) == [(0, 0), (1, 1), (2, 2), (3, 0)]
    assert run.summary.per_worker[0].members == 2
    assert {push.ticket.member for push in run.pushes} == {0, 1, 2, 3}
    assert differ(run.state, without_faults()) < CLOSE


def test_workers_are_respawned_again_and_again(tmp_path: Path) -> None:
    faults = [
        "kill worker 0 at update 2", "kill worker 1 at update 9",
        "stop worker 2 at update 12 for 60s", "kill worker 0 at update 17",
    ]  # fmt: skip
    run = faulty(tmp_path, *faults, respawn=True, delay=("80ms",))
    assert len(joined(run)) >= 6
    assert differ(run.state, without_faults()) < CLOSE


def test_a_worker_stopped_in_its_first_step_is_recognized(tmp_path: Path) -> None:
    """The stop is reported before the members are checked for the first time."""
    run = faulty(tmp_path, "stop worker 1 at step 1 for 60s", path="store")
    assert run.left == ["killed by signal 9"]
    assert differ(run.state, without_faults()) < CLOSE
