"""Training in virtual time is the inline run of the same arrivals, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from paceline.conditions.absences import Absence
from paceline.conditions.delays import parse_delay
from paceline.conditions.world import Conditions
from paceline.data.arrays import ArrayDataset, Splits
from paceline.engines.gradients import Computed, Gradients, num_seats
from paceline.engines.simulated import SimulatedRun
from paceline.engines.training import TrainingCraft
from paceline.events import Lease, Pushed
from paceline.ledger import Ledger
from paceline.protocols import parse
from paceline.records import Handed, Ordered
from paceline.trace import Trace, read_trace
from paceline.workloads.base import Task
from reference import State, differ, replay, replay_local_sgd, state_of
from runs import same_arrivals, train
from tiny import CLASSES, TASK, WIDTH, WITH_BATCH_NORM, Tied, plain_sgd, samples

WORKERS = 3
CLOSE = 1e-6
PROTOCOLS = [
    "full-sync", "k-sync:2", "k-batch-sync:4", "async", "k-async:2", "k-batch-async:4",
    "stale-synchronous:1", "local-sgd:3",
]  # fmt: skip


class Arrivals:
    """The pushes of a run, in their order."""

    def __init__(self, pushes: list[Pushed]) -> None:
        self.pushes = pushes


def simulate(
    task: Task, folder: Path, protocol_text: str, conditions: Conditions, **options: Any
) -> tuple[State, TrainingCraft]:
    """Train in virtual time; the parameters at the end, and what trained them."""
    protocol = parse(protocol_text, conditions.num_workers)
    craft = TrainingCraft(task, protocol, batch_size=task.batch_size, **options)
    ledger = Ledger(craft.num_samples, task.batch_size, protocol.num_pushes)
    trace = Trace(folder / "trace.jsonl")
    trace.header(task=task.name)
    run = SimulatedRun(
        protocol, ledger, conditions, craft=craft, trace=trace,
        hear_epoch=lambda epoch, at_s: epoch + 1 < task.epochs,
    )  # fmt: skip
    run.run(None)
    trace.close()
    craft.load_newest()
    return state_of(craft.model), craft


def stragglers(**changes: Any) -> Conditions:
    delays = tuple(parse_delay(text) for text in ("exp:30ms", "10ms", "5ms+exp:10ms"))
    return Conditions(delays=delays, slow={0: 3.0}, **changes)


class Dropped(Tied):
    """Draws random numbers, which must be those of its mini-batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(inputs, 0.3))


def layers() -> nn.Module:
    """Torch's own, which draw nothing; in float32, whose sums depend on how they are done."""
    return nn.Sequential(nn.Linear(WIDTH, 33), nn.ReLU(), nn.Linear(33, CLASSES))


def in_float32() -> Splits:
    splits = samples()
    assert splits.test is not None
    train, test = (
        ArrayDataset(one.inputs.float(), one.targets) for one in (splits.train, splits.test)
    )  # type: ignore[attr-defined]
    return replace(splits, train=train, test=test)


@pytest.mark.parametrize(
    "task",
    [
        WITH_BATCH_NORM,
        replace(TASK, model=Dropped, batch_size=11),
        replace(TASK, model=layers, data=in_float32, optimizer=plain_sgd, batch_size=11),
    ],
    ids=["batch norm", "dropout", "layers"],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_training_in_virtual_time_is_the_inline_run_bit_for_bit(
    tmp_path: Path, protocol: str, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = simulate(task, tmp_path, protocol, stragglers())
    records = list(read_trace(tmp_path / "trace.jsonl"))
    pushes = [one.fact for one in records if isinstance(one, Handed)]
    orders = [one.order for one in records if isinstance(one, Ordered)]
    arrivals = Arrivals(pushes)
    with same_arrivals(arrivals, monkeypatch):  # type: ignore[arg-type]
        inline = train(
            task, tmp_path / "inline", workers=WORKERS, protocol=protocol, engine="inline"
        )
    assert [one.ticket for one in inline.pushes] == [one.ticket for one in pushes]
    assert inline.orders == orders
    assert differ(state, inline.state) == 0.0
    assert [one.loss for one in inline.pushes] == [one.loss for one in pushes]


@pytest.mark.parametrize("protocol", ["k-sync:2", "k-batch-async:3", "local-sgd:2"])
def test_with_workers_that_come_and_go_it_is_the_update_equation(
    tmp_path: Path, protocol: str
) -> None:
    away = (
        Absence(worker=2, from_s=0.0, until_s=0.02),
        Absence(worker=1, from_s=0.05, until_s=0.1),
    )
    state, _ = simulate(WITH_BATCH_NORM, tmp_path, protocol, stragglers(absences=away))
    records = list(read_trace(tmp_path / "trace.jsonl"))
    if protocol.startswith("local-sgd"):
        expected = replay_local_sgd(WITH_BATCH_NORM, records, WORKERS + 1)
    else:
        expected = replay(WITH_BATCH_NORM, records)
    assert differ(state, expected) < CLOSE
    members = {one.fact.ticket.member for one in records if isinstance(one, Handed)}
    assert members == {0, 1, 2, 3}, "worker 1 did not come back as a new member"


def test_only_versions_that_somebody_holds_are_kept(tmp_path: Path) -> None:
    _, fresh = simulate(WITH_BATCH_NORM, tmp_path, "k-sync:2", stragglers())
    assert fresh.most_versions_kept == 0, "all are called off at an update"
    (tmp_path / "stale").mkdir()
    _, stale = simulate(WITH_BATCH_NORM, tmp_path / "stale", "async", stragglers())
    assert 1 <= stale.most_versions_kept < WORKERS
    assert not stale._kept
    assert not stale._holders


@pytest.mark.parametrize(
    ("protocol", "longest"), [("full-sync", 3), ("k-async:2", 3), ("async", 3), ("k-sync:2", 1)]
)
def test_who_holds_a_version_is_computed_in_a_row_where_nobody_is_called_off(
    tmp_path: Path, protocol: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    row = Gradients.row

    def counted(self: Gradients, leases: Sequence[Lease]) -> list[Computed]:
        sizes.append(len(leases))
        return row(self, leases)

    monkeypatch.setattr(Gradients, "row", counted)
    _, craft = simulate(TASK, tmp_path, protocol, stragglers())
    records = list(read_trace(tmp_path / "trace.jsonl"))
    assert max(sizes) == longest, "all begin at version 0"
    num_pushes = sum(isinstance(one, Handed) for one in records)
    assert num_pushes <= sum(sizes) <= num_pushes + WORKERS * TASK.epochs
    assert sorted(craft._gradients._free) == list(range(WORKERS + 1)), "a seat was not given back"
    assert not craft._rows
    assert not craft._waiting


def test_large_gradients_are_not_kept_for_a_row() -> None:
    assert num_seats(31_400, 8, is_batched=False) == 9
    assert num_seats(31_400, 100, is_batched=False) == 17
    assert num_seats(46_000_000, 8, is_batched=False) == 1
    assert num_seats(46_000_000, 8, is_batched=True) == 9
