"""Batched gradients equal single ones within the stated tolerance, or are refused by name."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.conditions.delays import parse_delay
from paceline.conditions.world import Conditions
from paceline.core.ledger import Ledger
from paceline.errors import ConfigError
from paceline.protocols import parse
from paceline.simulation.engine import SimulatedRun
from paceline.simulation.gradients import MOST, TOLERANCE, Together, num_together
from paceline.simulation.training import TrainingWork
from paceline.workloads.base import Task
from reference import differ, state_of
from tiny import TASK, WITH_BATCH_NORM, Tied

Trained = tuple[dict[str, Tensor], TrainingWork, SimulatedRun]


def trained(task: Task, text: str, *, is_batched: bool, rule: str = "none") -> Trained:
    protocol = parse(text, 4, rule)
    work = TrainingWork(task, protocol, batch_size=task.batch_size, is_batched=is_batched)
    conditions = Conditions(delays=(parse_delay("exp:1s"),) * 4, slow={0: 3.0})
    ledger = Ledger(work.num_samples, task.batch_size, protocol.num_pushes)
    run = SimulatedRun(
        protocol, ledger, conditions, work=work, hear_epoch=lambda epoch, at_s: epoch < 2
    )
    run.run(None)
    work.load_newest()
    return state_of(work.model), work, run


class Scaled(Tied):
    """Has a constant buffer and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("offset", torch.tensor([0.5, -0.5, 0.25], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * super().forward(inputs) + self.get_buffer("offset")


def test_constant_buffers_and_scalars_are_supported() -> None:
    task = replace(TASK, model=Scaled)
    one, _, _ = trained(task, "full-sync", is_batched=False)
    together, _, _ = trained(task, "full-sync", is_batched=True)
    assert differ(one, together) < TOLERANCE
    assert together["offset"].tolist() == [0.5, -0.5, 0.25]


@pytest.mark.parametrize(
    "text", ["full-sync", "k-sync:3", "k-async:2", "k-batch-async:3", "k-batch-sync:5", "async"]
)
@pytest.mark.parametrize("rule", ["none", "distance:0.002"])
def test_batched_gradients_equal_single_ones_within_tolerance(text: str, rule: str) -> None:
    """With tied weights, a frozen bias, momentum, decay, and a smaller last batch."""
    task = replace(TASK, batch_size=11)
    one, _, alone = trained(task, text, is_batched=False, rule=rule)
    together, work, run = trained(task, text, is_batched=True, rule=rule)
    assert differ(one, together) < TOLERANCE
    assert run.counts.times_s == alone.counts.times_s
    assert run.counts.staleness == alone.counts.staleness
    assert not work._ahead
    assert not work._waiting


def test_members_at_one_version_are_computed_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    rows = Together.rows

    def counted(self: Together, inputs: Tensor, targets: Tensor) -> object:
        sizes.append(len(inputs))
        return rows(self, inputs, targets)

    monkeypatch.setattr(Together, "rows", counted)
    _, _, run = trained(TASK, "full-sync", is_batched=True)
    assert sizes == [4] * run.counts.updates


def test_batch_counts_are_powers_of_two() -> None:
    assert [num_together(count) for count in (1, 2, 3, 7, 8, 1000)] == [1, 2, 2, 4, 8, MOST]


class Noisy(nn.Module):
    """A custom layer that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + torch.randn(len(inputs), 3, dtype=torch.float64)


class Branching(Noisy):
    """A layer that branches on its values."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs if outputs.sum() > 0 else -outputs


def with_dropout() -> nn.Module:
    return nn.Sequential(Tied(), nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (WITH_BATCH_NORM, r"module 'norm' \(BatchNorm1d\) keeps running statistics"),
        (replace(TASK, model=with_dropout), r"module '1' \(Dropout\) draws random numbers"),
        (replace(TASK, model=Noisy), "cannot compute tiny: RuntimeError.*random"),
        (replace(TASK, model=Branching), "cannot compute tiny: .*; leave --batched out"),
    ],
    ids=["batch norm", "dropout", "random", "branch"],
)
def test_unbatchable_module_is_named(task: Task, message: str) -> None:
    task = replace(task, optimizer=functools.partial(torch.optim.SGD))
    with pytest.raises(ConfigError, match=message):
        trained(task, "full-sync", is_batched=True)


def test_local_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="under local-sgd:2 each worker steps on parameters"):
        trained(TASK, "local-sgd:2", is_batched=True)


def test_wrong_batched_gradient_is_refused() -> None:
    class Uneven(nn.Module):
        """Counts its calls; the first one is a trace."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3).double()
            self.calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            outputs: Tensor = self.layer(inputs) * self.calls
            return outputs

    task = replace(TASK, model=Uneven, optimizer=functools.partial(torch.optim.SGD))
    with pytest.raises(ConfigError, match=r"the gradient of 'layer\.weight' is off by"):
        trained(task, "full-sync", is_batched=True)
