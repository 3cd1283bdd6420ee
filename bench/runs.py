"""Whole runs for the benches: quiet, in a folder that goes away, read from their traces alone."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from paceline.config import resolve
from paceline.data.arrays import ArrayDataset
from paceline.events import Apply, Grant
from paceline.launcher import launch_run
from paceline.program import Program, TaskProgram
from paceline.records import Handed, Ordered, Record
from paceline.report.live import QuietObserver
from paceline.trace import FILE_NAME, read_trace
from paceline.workloads.base import Splits, Task, loss_metrics

# Workers do not look for modules in this folder: what a task needs from here travels with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run(program: "Program | Task", **settings: Any) -> list[Record]:
    """One run; the records of its trace."""
    if isinstance(program, Task):
        program = TaskProgram(task=program)
    with tempfile.TemporaryDirectory() as folder:
        chosen = resolve({**settings, "run_dir": folder}, env={}, is_call=True).settings
        launch_run(program, chosen, QuietObserver())
        return list(read_trace(Path(folder) / FILE_NAME))


def update_times_s(records: Sequence[Record]) -> list[float]:
    """When each update was decided, in seconds since the run's start."""
    return [one.t_s for one in records if isinstance(one, Ordered) and isinstance(one.order, Apply)]


def first_grant_s(records: Sequence[Record]) -> float:
    """When the first worker was let go."""
    return next(
        one.t_s for one in records if isinstance(one, Ordered) and isinstance(one.order, Grant)
    )


def num_pushes(records: Sequence[Record]) -> int:
    return sum(isinstance(one, Handed) for one in records)


def staleness(records: Sequence[Record], skip_updates: int = 0) -> list[int]:
    """Versions between pull and update of every push that was applied, after the first updates."""
    found: list[int] = []
    version = 0
    for one in records:
        if isinstance(one, Ordered) and isinstance(one.order, Apply):
            if version >= skip_updates:
                found += [version - ticket.version for ticket in one.order.tickets]
            version += 1
    return found


class Point(nn.Module):
    """Four parameters: the least that can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs


def point_task(num_samples: int) -> Task:
    """A task that computes nearly nothing, so that a worker's time is what ``--delay`` says.

    Args:
        num_samples: so many that no epoch ends while something is measured.
    """

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum()

    def data() -> Splits:
        inputs, targets = torch.zeros(1, 4), torch.zeros(1)
        train = ArrayDataset(inputs.expand(num_samples, 4), targets.expand(num_samples))
        return Splits(train=train, source="one number, many times")

    return Task(
        name="point",
        model=Point,
        loss=loss,
        data=data,
        learning_rate=1e-6,
        batch_size=1,
        epochs=1,
        metrics=loss_metrics(loss),
    )
