"""Several workers compute what one process with the whole batch computes, to 1e-6 in float64.

On a model with tied weights, a frozen parameter, two parameter groups, momentum and weight decay.
"""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.workloads.base import Task
from reference import differ, plain_loop
from runs import assert_each_sample_once, train
from tiny import BATCH_SIZE, EPOCHS, NUM_SAMPLES, PLAIN_SGD, TASK, samples

CLOSE = 1e-6
INLINE = {"engine": "inline"}
STORE = {"engine": "local", "path": "store"}
PEERS = {"engine": "local", "path": "peers"}


@pytest.mark.parametrize("where", [INLINE, STORE, PEERS])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_full_sync_equals_one_process_with_the_whole_batch(
    tmp_path: Path, workers: int, where: dict[str, str]
) -> None:
    run = train(TASK, tmp_path, workers=workers, protocol="full-sync", **where)
    assert run.path == where.get("path", "store")
    assert differ(run.state, plain_loop(TASK)) < CLOSE
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)


@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:1"])
def test_all_reduce_equals_one_process_with_the_whole_batch(tmp_path: Path, protocol: str) -> None:
    """The path used with one accelerator per worker, here between CPUs over gloo."""
    run = train(TASK, tmp_path, workers=2, protocol=protocol, path="collective")
    assert differ(run.state, plain_loop(TASK)) < CLOSE
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)


@pytest.mark.parametrize("where", [INLINE, PEERS])
def test_unequal_mini_batches_and_a_short_last_batch_are_weighted_by_samples(
    tmp_path: Path, where: dict[str, str]
) -> None:
    """61 samples in batches of 13 for three workers: 5, 4 and 4; the last batch is 3, 3 and 3."""
    task = replace(TASK, data=functools.partial(samples, 61), batch_size=13)
    run = train(task, tmp_path, workers=3, protocol="full-sync", **where)
    assert differ(run.state, plain_loop(task)) < CLOSE
    assert_each_sample_once(run, 61, EPOCHS)


@pytest.mark.parametrize("where", [INLINE, STORE])
@pytest.mark.parametrize("protocol", ["k-sync:3", "k-async:3"])
def test_k_sync_and_k_async_with_k_equal_p_equal_full_sync(
    tmp_path: Path, protocol: str, where: dict[str, str]
) -> None:
    run = train(TASK, tmp_path, workers=3, protocol=protocol, **where)
    assert differ(run.state, plain_loop(TASK)) < CLOSE


def test_k_batch_sync_with_one_push_per_worker_equals_full_sync(tmp_path: Path) -> None:
    run = train(TASK, tmp_path, workers=3, protocol="k-batch-sync:3", engine="inline")
    members = [push.ticket.member for push in run.pushes]
    assert all(set(members[i : i + 3]) == {0, 1, 2} for i in range(0, len(members), 3))
    assert differ(run.state, plain_loop(TASK)) < CLOSE


@pytest.mark.parametrize("where", [INLINE, STORE])
@pytest.mark.parametrize("protocol", ["async", "k-batch-async:1"])
def test_one_asynchronous_worker_equals_the_plain_loop(
    tmp_path: Path, protocol: str, where: dict[str, str]
) -> None:
    run = train(TASK, tmp_path, workers=1, protocol=protocol, **where)
    assert differ(run.state, plain_loop(TASK)) < CLOSE


@pytest.mark.parametrize("where", [INLINE, PEERS])
@pytest.mark.parametrize("task", [TASK, PLAIN_SGD], ids=["momentum", "plain"])
def test_local_sgd_with_one_step_equals_full_sync(
    tmp_path: Path, task: Task, where: dict[str, str]
) -> None:
    run = train(task, tmp_path, workers=2, protocol="local-sgd:1", **where)
    assert run.path == where.get("path", "store")
    assert differ(run.state, plain_loop(task)) < CLOSE


def test_ssp_without_slack_equals_full_sync_at_p_times_the_rate(tmp_path: Path) -> None:
    """Inline, where a worker pulls as soon as it is released: live runs may see newer versions."""
    task = replace(PLAIN_SGD, learning_rate=0.1, batch_size=BATCH_SIZE // 3)
    run = train(task, tmp_path, workers=3, protocol="stale-synchronous:0", engine="inline")
    assert [push.ticket.version for push in run.pushes] == [i // 3 * 3 for i in range(30)]
    assert differ(run.state, plain_loop(task, batch_size=BATCH_SIZE, lr=0.3)) < CLOSE


def test_equivalences_can_fail() -> None:
    """Another sample order or learning rate gives other parameters."""
    right = plain_loop(TASK)
    assert differ(right, plain_loop(TASK, lr=0.29)) > 100 * CLOSE
    assert differ(right, plain_loop(TASK, batch_size=20)) > 100 * CLOSE
