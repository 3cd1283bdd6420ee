"""Simulated training equals the inline run with the same arrivals, bit for bit."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from paceline.conditions.delays import parse_delay
from paceline.conditions.world import Absence, Conditions
from paceline.core.ledger import Ledger
from paceline.errors import WorkerError
from paceline.events import Lease, Pushed
from paceline.protocols import parse
from paceline.simulation import training
from paceline.simulation.engine import SimulatedRun
from paceline.simulation.gradients import Computed, Gradients, num_seats
from paceline.simulation.training import TrainingWork
from paceline.trace import Trace, read_trace
from paceline.trace.records import Handed, Ordered
from paceline.workloads.base import Task
from reference import State, differ, replay, replay_local_sgd, state_of
from runs import same_arrivals, train
from tiny import LAYERS, TASK, WITH_BATCH_NORM, Tied, plain_sgd

WORKERS = 3
CLOSE = 1e-6
PROTOCOLS = [
    "full-sync", "k-sync:2", "k-batch-sync:4", "async", "k-async:2", "k-batch-async:4",
    "stale-synchronous:1", "local-sgd:3", "local-sgd:3+nesterov:0.7,0.9",
    "adaptive-local:3+momentum:0.5,0.5", "post-local-sgd:4,3",
    "local-sgd:4+fragments:2", "local-sgd:4+fragments:2,1",
    "local-sgd:3+nesterov:0.7,0.9+fragments:3",
]  # fmt: skip


class Arrivals:
    """The pushes of a run, in order."""

    def __init__(self, pushes: list[Pushed]) -> None:
        self.pushes = pushes


def simulate(
    task: Task, folder: Path, protocol_text: str, conditions: Conditions, **options: Any
) -> tuple[State, TrainingWork]:
    """Train in virtual time; return the final parameters and the object that trained them."""
    protocol = parse(protocol_text, conditions.num_workers)
    work = TrainingWork(task, protocol, batch_size=task.batch_size, **options)
    ledger = Ledger(work.num_samples, task.batch_size, protocol.num_pushes)
    trace = Trace(folder / "trace.jsonl")
    trace.header(task=task.name)
    run = SimulatedRun(
        protocol, ledger, conditions, work=work, trace=trace,
        hear_epoch=lambda epoch, at_s: epoch + 1 < task.epochs,
    )  # fmt: skip
    run.run(None)
    trace.close()
    work.load_newest()
    return state_of(work.model), work


def stragglers(**changes: Any) -> Conditions:
    delays = tuple(parse_delay(text) for text in ("exp:30ms", "10ms", "5ms+exp:10ms"))
    return Conditions(delays=delays, slow={0: 3.0}, **changes)


class Dropped(Tied):
    """Draws random numbers, which must be those of its mini-batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(inputs, 0.3))


@pytest.mark.parametrize(
    "task",
    [
        WITH_BATCH_NORM,
        replace(TASK, model=Dropped, batch_size=11),
        LAYERS,
    ],
    ids=["batch norm", "dropout", "layers"],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_simulated_training_equals_the_inline_run_bitwise(
    tmp_path: Path, protocol: str, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = simulate(task, tmp_path, protocol, stragglers())
    records = list(read_trace(tmp_path / "trace.jsonl"))
    pushes = [record.fact for record in records if isinstance(record, Handed)]
    orders = [record.order for record in records if isinstance(record, Ordered)]
    arrivals = Arrivals(pushes)
    with same_arrivals(arrivals, monkeypatch):  # type: ignore[arg-type]
        inline = train(
            task, tmp_path / "inline", workers=WORKERS, protocol=protocol, engine="inline"
        )
    assert [push.ticket for push in inline.pushes] == [push.ticket for push in pushes]
    assert inline.orders == orders
    assert differ(state, inline.state) == 0.0
    assert [push.loss for push in inline.pushes] == [push.loss for push in pushes]


@pytest.mark.parametrize("task", [WITH_BATCH_NORM, TASK], ids=["batch norm", "tied"])
@pytest.mark.parametrize("protocol", ["k-sync:2", "k-batch-async:3", "async", "local-sgd:2"])
def test_simulated_training_with_absences_follows_the_update_equation(
    tmp_path: Path, protocol: str, task: Task
) -> None:
    away = (
        Absence(worker=2, from_s=0.0, until_s=0.02),
        Absence(worker=1, from_s=0.05, until_s=0.1),
    )
    state, _ = simulate(task, tmp_path, protocol, stragglers(absences=away))
    records = list(read_trace(tmp_path / "trace.jsonl"))
    if protocol.startswith("local-sgd"):
        expected = replay_local_sgd(task, records, WORKERS + 1)
    else:
        expected = replay(task, records)
    assert differ(state, expected) < CLOSE
    members = {record.fact.ticket.member for record in records if isinstance(record, Handed)}
    assert members == {0, 1, 2, 3}, "worker 1 did not come back as a new member"


def test_only_versions_held_by_a_worker_are_kept(tmp_path: Path) -> None:
    _, fresh = simulate(WITH_BATCH_NORM, tmp_path, "k-sync:2", stragglers())
    assert fresh.most_versions_kept == 0, "all are called off at an update"
    (tmp_path / "stale").mkdir()
    _, stale = simulate(WITH_BATCH_NORM, tmp_path / "stale", "async", stragglers())
    assert 1 <= stale.most_versions_kept < WORKERS
    assert not stale._versions.num_held


@pytest.mark.parametrize(
    ("protocol", "longest"), [("full-sync", 3), ("k-async:2", 3), ("async", 3), ("k-sync:2", 1)]
)
def test_gradients_of_one_version_are_batched_unless_cancelled(
    tmp_path: Path, protocol: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    row = Gradients.row

    def counted(self: Gradients, leases: Sequence[Lease]) -> list[Computed]:
        sizes.append(len(leases))
        return row(self, leases)

    monkeypatch.setattr(Gradients, "row", counted)
    _, work = simulate(TASK, tmp_path, protocol, stragglers())
    records = list(read_trace(tmp_path / "trace.jsonl"))
    assert max(sizes) == longest, "all begin at version 0"
    num_pushes = sum(isinstance(record, Handed) for record in records)
    assert num_pushes <= sum(sizes) <= num_pushes + WORKERS * TASK.epochs
    assert sorted(work._gradients._free) == list(range(1 + WORKERS if longest > 1 else 1))
    assert not work._ahead
    assert not work._waiting
    assert not work._versions.num_held


@pytest.mark.parametrize("rule", ["none", "distance:0.002"])
@pytest.mark.parametrize("num_seats", [1, 3, 4])
def test_fewer_seats_than_workers_change_no_bit(
    tmp_path: Path, num_seats: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = tuple(parse_delay(f"exp:{5 + worker}ms") for worker in range(9))
    states = []
    for seats in (10, num_seats):
        monkeypatch.setattr(training, "num_seats", lambda *_, seats=seats, **__: seats)
        folder = tmp_path / str(seats)
        folder.mkdir()
        task = replace(LAYERS, batch_size=18)
        state, work = simulate(task, folder, f"k-async:3+{rule}", Conditions(delays=delays))
        states.append(state)
        assert sorted(work._gradients._free) == list(range(seats))
        assert not work._versions.num_held
    assert differ(*states) == 0.0


def test_num_seats_depends_on_size_and_batching() -> None:
    assert num_seats(31_400, 8, is_batched=False) == 9
    assert num_seats(31_400, 100, is_batched=False) == 101
    assert num_seats(31_400, 1, is_batched=False) == 1
    assert num_seats(3 << 20, 8, is_batched=False) == 1
    assert num_seats(3 << 20, 8, is_batched=True) == 9


class Poisoned(nn.Module):
    """Its loss is nan where the first input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        factor = torch.where(inputs[:, :1] > 1.5, torch.nan, 1.0)
        outputs: Tensor = self.layer(inputs) * factor
        return outputs


def test_nonfinite_gradient_in_a_row_affects_only_its_member(tmp_path: Path) -> None:
    task = replace(TASK, model=Poisoned, optimizer=plain_sgd)
    with pytest.raises(WorkerError, match=r"worker \d.*layer\.weight"):
        simulate(task, tmp_path, "full-sync", stragglers())
    simulate(task, tmp_path, "full-sync", stragglers(), nonfinite="skip")
    pushes = [one.fact for one in read_trace(tmp_path / "trace.jsonl") if isinstance(one, Handed)]
    is_finite = [push.is_finite for push in pushes]
    assert any(is_finite)
    assert not all(is_finite)
    assert [math.isfinite(push.loss) for push in pushes] == is_finite


class Drawing(SGD):
    """Adds noise to what it steps to."""

    def step(self, closure: object = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def test_optimizer_that_draws_numbers_steps_right_after_its_push(tmp_path: Path) -> None:
    """From the random state after the push, so no other gradient may be computed in between."""
    task = replace(LAYERS, optimizer=lambda parameters, lr: Drawing(parameters, lr=lr))
    _, work = simulate(task, tmp_path, "full-sync", stragglers())
    assert work._gradients._free == [0]
