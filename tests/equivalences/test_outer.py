"""DiLoCo and its variants equal a plain PyTorch loop on every supported path.

The loop follows the paper: H steps of each worker's own optimizer, the mean of their parameter
changes, and the outer step with momentum. The trace of a run says which worker had which
mini-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import RunSettings
from paceline.events import Apply, Grant, Ticket
from paceline.launch import launcher
from paceline.plan import Plan
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.trace.records import Handed, Ordered, Record
from paceline.workloads.base import Task
from reference import Order, State, average, differ, fresh, plain_loop, state_of
from runs import Run, assert_each_sample_once, leases_of, train
from tiny import EPOCHS, NUM_SAMPLES, TASK, WITH_BATCH_NORM, with_optimizer

EXACT = 1e-10
NESTEROV = "nesterov:0.7,0.9"


@dataclass(frozen=True)
class Outer:
    """The outer step of one run, computed by its formula."""

    lr: float
    momentum: float = 0.0
    is_nesterov: bool = False


OUTERS = {
    "sgd:0.5": Outer(0.5),
    "momentum:0.6,0.5": Outer(0.6, 0.5),
    NESTEROV: Outer(0.7, 0.9, is_nesterov=True),
}


def diloco(task: Task, records: Sequence[Record], num_workers: int, outer: Outer) -> State:
    """The parameters after the rounds of a trace."""
    model, _ = fresh(task)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    state, order = state_of(model), Order(task)
    velocity: State = {}
    leases = leases_of(one.order for one in records if isinstance(one, Ordered))
    own = [fresh(task) for _ in range(num_workers)]
    moved: dict[Ticket, State] = {}
    for record in records:
        if isinstance(record, Handed):
            ticket = record.fact.ticket
            mine, optimizer = own[ticket.member]
            mine.load_state_dict(state)
            for lease in leases[ticket[:2]]:
                inputs, targets = order.batch(lease)
                optimizer.zero_grad()
                task.loss(mine(inputs), targets).backward()
                optimizer.step()
            moved[ticket] = state_of(mine)
        elif isinstance(record, Ordered) and isinstance(record.order, Apply):
            tickets, weights = record.order
            mean = average([moved[one] for one in tickets], weights)
            before, state = state, mean
            for name in names:
                delta = before[name] - mean[name]
                velocity[name] = outer.momentum * velocity.get(name, 0.0 * delta) + delta
                step = velocity[name]
                if outer.is_nesterov:
                    step = delta + outer.momentum * velocity[name]
                state = {**state, name: before[name] - outer.lr * step}
    return state


WAYS: dict[str, dict[str, Any]] = {
    "inline": {"engine": "inline"},
    "through the store": {"path": "store"},
    "between peers": {"path": "peers"},
    "all-reduce": {"path": "collective"},
}


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("workers", [2, 4])
def test_inline_outer_optimizer_equals_the_plain_loop(
    tmp_path: Path, workers: int, outer: str
) -> None:
    run = _train(tmp_path, workers, outer, engine="inline")
    assert differ(run.state, diloco(_task(), run.records, workers, OUTERS[outer])) < EXACT


@pytest.mark.parametrize(
    ("way", "workers"),
    [("through the store", 2), ("between peers", 2), ("between peers", 4), ("all-reduce", 2)],
)
def test_live_outer_optimizer_equals_the_plain_loop(tmp_path: Path, way: str, workers: int) -> None:
    run = _train(tmp_path, workers, NESTEROV, **WAYS[way])
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, diloco(_task(), run.records, workers, OUTERS[NESTEROV])) < EXACT


@pytest.mark.parametrize("way", WAYS)
def test_outer_sgd_of_rate_1_equals_plain_averaging(tmp_path: Path, way: str) -> None:
    """Bitwise, except where pushes are summed in the order of arrival."""
    plain, run = (
        _train(tmp_path / outer.partition(":")[0], 2, outer, **WAYS[way])
        for outer in ("none", "sgd:1.0")
    )
    assert differ(run.state, plain.state) <= (1e-12 if way == "through the store" else 0.0)


@pytest.mark.parametrize("way", ["through the store", "between peers"])
def test_killed_worker_loses_no_outer_momentum(tmp_path: Path, way: str) -> None:
    """Another worker does the work it had started; its replacement gets the newest version."""
    task = replace(_task(), epochs=6)
    run = train(
        task, tmp_path, workers=3, protocol="local-sgd:2", outer=NESTEROV, delay=("20ms",),
        fault=("kill worker 1 at update 5",), respawn=True, **WAYS[way],
    )  # fmt: skip
    assert run.left == ["killed by signal 9"]
    assert_each_sample_once(run, NUM_SAMPLES, 6)
    assert max(push.ticket.member for push in run.pushes) == 3, "nobody took its place"
    assert differ(run.state, diloco(task, run.records, 4, OUTERS[NESTEROV])) < EXACT


def test_compressed_differences_stay_near_uncompressed_ones(tmp_path: Path) -> None:
    """int8 with error feedback: close to the uncompressed ones, but not equal."""
    run = _train(tmp_path, 2, NESTEROV, compress="int8", **WAYS["all-reduce"])
    expected = diloco(_task(), run.records, 2, OUTERS[NESTEROV])
    assert EXACT < differ(run.state, expected) < 5e-3


# -- post-local-sgd --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_post_local_sgd_starts_as_full_sync(tmp_path: Path, way: str) -> None:
    """With momentum, decay and two groups; later updates are those of local-sgd."""
    settings = {"workers": 3, "protocol": "post-local-sgd:5,3", **WAYS[way]}
    first = train(TASK, tmp_path / "first", updates=5, **settings)
    assert differ(first.state, plain_loop(replace(TASK, epochs=1))) < EXACT
    run = train(TASK, tmp_path / "whole", **settings)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    steps = [len(order.leases) for order in run.orders if isinstance(order, Grant)]
    assert steps == [1] * 15 + [3] * 3 + [2] * 3
    expected = diloco(TASK, run.records, 3, Outer(1.0))
    assert differ(run.state, expected) < EXACT


def test_deviations_from_full_sync_are_noted(tmp_path: Path) -> None:
    adam = plan_of(with_optimizer(torch.optim.Adam, 0.01), tmp_path)
    assert any("own Adam, as under local-sgd:1" in text for text in adam.notes)
    plain = plan_of(TASK, tmp_path, outer="none")
    assert not any("full-sync" in text for text in plain.notes)
    assert any("outer sgd:0.5 steps on" in text for text in plan_of(TASK, tmp_path).notes)
    assert ("outer optimizer", "sgd:0.5 on the mean of what local steps have changed") in (
        adam.rows()
    )


def plan_of(task: Task, folder: Path, outer: str = "sgd:0.5") -> Plan:
    observer = QuietObserver()
    settings = RunSettings(
        workers=2, protocol="post-local-sgd:3,3", outer=outer, engine="inline", dry_run=True,
        run_dir=str(folder), device="cpu",
    )  # fmt: skip
    launcher.launch_run(TaskProgram(task=task), settings, observer)
    assert observer.shown_plan is not None
    return observer.shown_plan


def _task() -> Task:
    """Pushes of different sizes, and a last batch that is not full."""
    return replace(WITH_BATCH_NORM, batch_size=13, learning_rate=0.02)


def _train(folder: Path, workers: int, outer: str, **settings: Any) -> Run:
    return train(_task(), folder, workers=workers, protocol="local-sgd:3", outer=outer, **settings)
