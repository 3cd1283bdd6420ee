"""Two stages compared with torch's own pipelining at an even cut, as written by hand.

    ours     paceline train TASK --workers 2 --split network: its own cut and micro-batches
    A/A      the same again
    theirs   torch.distributed.pipelining, Schedule1F1B, as many layers for each stage, a bare loop:
             the fastest of 2, 4 and 8 micro-batches

All have the same task, batch and optimizer, and go on in turn, for a window each (standing.py).
bench/splits.py writes the rows.
"""

import itertools
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import TensorDataset

from paceline import Splits, Task
from paceline.partition.placement import even_parts
from paceline.splits.measuring import measure
from paceline.splits.parts import make_parts
from paceline.splits.tracing import trace
from paceline.system.processors import num_cores
from paceline.trainer import make_loader
from paceline.workloads import load_task
from paceline.workloads.base import loss_metrics
from standing import StandingCommand, StandingRun, Start, standing
from table import say

HERE = Path(__file__).stem
MICRO_BATCHES = (2, 4, 8)
UPDATES = 14
"""Updates of an epoch."""
BATCH, WIDTH = 256, 1024


def make_task(name: str, widths: tuple[int, ...]) -> Task:
    """Return a task of linear layers with activations between them."""

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for width_in, width_out in itertools.pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def data() -> Splits:
        rng = torch.Generator().manual_seed(0)
        inputs = torch.randn(UPDATES * BATCH, widths[0], generator=rng)
        targets = torch.randint(0, widths[-1], (UPDATES * BATCH,), generator=rng)
        return Splits(train=TensorDataset(inputs, targets), test=None, source="made up")

    loss = nn.functional.cross_entropy
    return Task(
        name=name, model=model, loss=loss, data=data, learning_rate=0.01, batch_size=BATCH,
        epochs=1, metrics=loss_metrics(loss),
    )  # fmt: skip


def even() -> Task:
    return make_task("eight equal layers", (WIDTH,) * 9)


def uneven() -> Task:
    """Four wide layers, between which a cut can be, then five narrow ones."""
    return make_task("four wide layers and five narrow", (*(1536,) * 5, *(384,) * 5))


def coarse() -> Task:
    """Two wide layers, then six narrow ones.

    The second wide layer alone has two fifths of the work: no cut gives the larger part less than
    seven tenths, and the even cut gives it nearly nine.
    """
    return make_task("two wide layers and six narrow", (2048, 2048, 2048, *(512,) * 6))


class TorchRun(StandingCommand):
    """A loop of torch's own pipelining, whose first rank writes the seconds of its steps."""

    def __init__(self, task: str, micro_batches: int, folder: Path) -> None:
        self._steps, self._num_read = folder / "steps", 0
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            __file__, task, str(micro_batches), str(self._steps),
        ]  # fmt: skip
        super().__init__(f"torch, {micro_batches} micro-batches", command, {}, folder / "errors")

    def _new_steps(self) -> list[float]:
        lines = self._steps.read_text().splitlines()[:-1] if self._steps.exists() else []
        new, self._num_read = lines[self._num_read :], len(lines)
        return [float(line) for line in new]


class Turn(NamedTuple):
    """Median seconds of a step in one window of each run."""

    ours_s: float
    again_s: float
    theirs_s: float


def measure_beside_torch(name: str, num_turns: int) -> list[Turn]:
    """Return the windows of ours, of ours again, and of the fastest of torch's."""
    ours = partial(StandingRun, f"{HERE}:{name}", 2, BATCH, "network")
    theirs = (partial(TorchRun, name, num) for num in MICRO_BATCHES)
    starts: list[Start] = [ours, ours, *theirs]
    with standing(starts) as runs:
        window_s = max(run.window_s for run in runs)
        medians_s: list[list[float]] = [[] for _ in runs]
        for number in range(num_turns):
            for run, turns_s in zip(runs, medians_s, strict=True):
                run.go_on(window_s)
                turns_s.append(statistics.median(run.take_steps()))
            say(
                f"{name}, turn {number + 1} of {num_turns}: "
                + ", ".join(
                    f"{run.name} {turns_s[-1]:.3f} s"
                    for run, turns_s in zip(runs, medians_s, strict=True)
                )
            )
    ours_s, again_s, *others_s = medians_s
    theirs_s = min(others_s, key=statistics.median)
    return [Turn(*turn) for turn in zip(ours_s, again_s, theirs_s, strict=True)]


def run_rank(name: str, micro_batches: int, out: Path) -> None:
    """Run one of the two ranks until it is ended."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(max(1, num_cores() // 2))
    torch.manual_seed(0)
    task = replace(load_task(f"{HERE}:{name}", 2))
    loader = make_loader(task.splits().train, task.batch_size, is_shuffled=True)
    sample = next(iter(loader))[0][:8]
    traced = trace(task.module().train(), (sample,))
    part = make_parts(traced, even_parts(measure(traced, (sample,)).graph, 2))[rank].module
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=task.loss)
    optimizer = task.optimizer(part.parameters(), task.learning_rate)
    start_s = time.perf_counter()
    for inputs, targets in itertools.chain.from_iterable(itertools.repeat(loader)):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
        end_s = time.perf_counter()
        if rank == 0:
            with out.open("a") as file:
                print(end_s - start_s, file=file)
        start_s = end_s


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    run_rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
