"""Whole runs for the benches: quiet, in a folder that goes away, read from their traces alone."""

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

# Workers do not look for modules in this folder: what a task needs from here travels with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run(program: "Program | Task | str", **settings: Any) -> list[Record]:
    """One run; the records of its trace."""
    with tempfile.TemporaryDirectory() as folder:
        run_in(Path(folder), program, **settings)
        return records_of(Path(folder))


def run_in(folder: Path, program: "Program | Task | str", **settings: Any) -> None:
    """One run whose files lie in this folder.

    Args:
        program: a task, also by its name, is trained by the standard loop.
    """
    if isinstance(program, Task | str):
        program = TaskProgram(task=program)
    chosen = resolve({**settings, "run_dir": str(folder)}, env={}, is_call=True).settings
    launch_run(program, chosen, QuietObserver())


def run_alone(folder: Path, program: "Program | Task | str", **settings: Any) -> Path:
    """One run in a folder below this one, which is returned; again (at most twice) where others
    (processes that were there before) used more than a tenth of a core meanwhile: foreign load is
    not explained away."""
    for attempt in range(3):
        place = folder / f"attempt-{attempt}"
        start_s, before = time.perf_counter(), _seconds_of_others()
        run_in(place, program, **settings)
        after = _seconds_of_others()
        used_s = sum(
            after.get(pid, 0.0) - seconds for pid, seconds in before.items() if pid in after
        )
        share = used_s / (time.perf_counter() - start_s)
        if share <= 0.1:
            break
        print(f"    others used {share:.2f} cores", flush=True)
    return place


def records_of(folder: Path) -> list[Record]:
    """The records of the trace of the run that lies there."""
    return list(read_trace(folder / FILE_NAME))


def _seconds_of_others() -> dict[int, float]:
    """Seconds of cores that each process there is but this one has used, by its number."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        found[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    found.pop(os.getpid(), None)
    return found


def update_times_s(records: Sequence[Record]) -> list[float]:
    """When each update was decided, in seconds since the run's start."""
    return [one.t_s for one in records if isinstance(one, Ordered) and isinstance(one.order, Apply)]


def update_gaps_s(records: Sequence[Record]) -> list[float]:
    """Seconds between updates of one epoch: what lies between epochs, evaluations, is left out."""
    gaps_s, last_s = list[float](), math.nan
    for one in records:
        if isinstance(one, Ordered) and isinstance(one.order, EpochEnd):
            last_s = math.nan
        elif isinstance(one, Ordered) and isinstance(one.order, Apply):
            if not math.isnan(last_s):
                gaps_s.append(one.t_s - last_s)
            last_s = one.t_s
    return gaps_s


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
