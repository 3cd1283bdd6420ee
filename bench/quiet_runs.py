"""Whole runs for the benches: quiet, in a temporary folder, read from their traces alone."""

import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from paceline.config import resolve
from paceline.data.arrays import ArrayDataset
from paceline.events import Apply, EpochEnd, Grant
from paceline.launch.launcher import launch_run
from paceline.program import Program, TaskProgram
from paceline.report.live import QuietObserver
from paceline.trace import FILE_NAME, read_trace
from paceline.trace.records import Handed, Ordered, Record
from paceline.workloads.base import Splits, Task, loss_metrics

# Workers do not import modules from this folder: a task is pickled with what it needs from here.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run(program: "Program | Task | str", **settings: Any) -> list[Record]:
    """Run a program once and return the records of its trace."""
    with tempfile.TemporaryDirectory() as folder:
        run_in(Path(folder), program, **settings)
        return records_of(Path(folder))


def run_in(folder: Path, program: "Program | Task | str", **settings: Any) -> None:
    """Run a program once, with its files in ``folder``.

    Args:
        program: a task, or the name of one, is trained by the standard loop.
    """
    if isinstance(program, Task | str):
        program = TaskProgram(task=program)
    run_settings = resolve({**settings, "run_dir": str(folder)}, env={}, is_call=True).settings
    launch_run(program, run_settings, QuietObserver())


def run_alone(folder: Path, program: "Program | Task | str", **settings: Any) -> Path:
    """Run in a folder below ``folder`` and return it; repeat (at most twice) if other processes
    that existed before used more than a tenth of a core meanwhile: foreign load is not explained
    away."""
    for attempt in range(3):
        run_dir = folder / f"attempt-{attempt}"
        start_s, before = time.perf_counter(), _other_cpu_seconds()
        run_in(run_dir, program, **settings)
        after = _other_cpu_seconds()
        used_s = sum(
            after.get(pid, 0.0) - seconds for pid, seconds in before.items() if pid in after
        )
        share = used_s / (time.perf_counter() - start_s)
        if share <= 0.1:
            break
        print(f"    others used {share:.2f} cores", flush=True)
    return run_dir


def records_of(folder: Path) -> list[Record]:
    """Read the records of the trace of the run in ``folder``."""
    return list(read_trace(folder / FILE_NAME))


def _other_cpu_seconds() -> dict[int, float]:
    """Return the CPU seconds of every process but this one, by PID."""
    seconds_by_pid = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        seconds_by_pid[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf(
            "SC_CLK_TCK"
        )
    seconds_by_pid.pop(os.getpid(), None)
    return seconds_by_pid


def update_times_s(records: Sequence[Record]) -> list[float]:
    """Return when each update was decided, in seconds since the start of the run."""
    return [
        record.t_s
        for record in records
        if isinstance(record, Ordered) and isinstance(record.order, Apply)
    ]


def update_gaps_s(records: Sequence[Record]) -> list[float]:
    """Return the seconds between updates within an epoch, which leaves out evaluations."""
    gaps_s, last_s = list[float](), math.nan
    for record in records:
        if isinstance(record, Ordered) and isinstance(record.order, EpochEnd):
            last_s = math.nan
        elif isinstance(record, Ordered) and isinstance(record.order, Apply):
            if not math.isnan(last_s):
                gaps_s.append(record.t_s - last_s)
            last_s = record.t_s
    return gaps_s


def first_grant_s(records: Sequence[Record]) -> float:
    """Return when the first worker was granted a step."""
    return next(
        record.t_s
        for record in records
        if isinstance(record, Ordered) and isinstance(record.order, Grant)
    )


def num_pushes(records: Sequence[Record]) -> int:
    return sum(isinstance(record, Handed) for record in records)


def staleness(records: Sequence[Record], skip_updates: int = 0) -> list[int]:
    """Return the versions between pull and update of each applied push, after the first ones."""
    lags: list[int] = []
    version = 0
    for record in records:
        if isinstance(record, Ordered) and isinstance(record.order, Apply):
            if version >= skip_updates:
                lags += [version - ticket.version for ticket in record.order.tickets]
            version += 1
    return lags


class Point(nn.Module):
    """A model of four parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs


def point_task(num_samples: int) -> Task:
    """Return a task that computes almost nothing: ``--delay`` determines a worker's time.

    Args:
        num_samples: enough that no epoch ends during a measurement.
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
