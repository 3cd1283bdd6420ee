"""Two stages compared with torch's own pipelining at an even cut, as written by hand.

    ours     paceline train TASK --workers 2 --split network: its own cut and micro-batches
    theirs   torch.distributed.pipelining, Schedule1F1B, as many layers for each stage, a bare loop:
             the fastest of 2, 4 and 8 micro-batches

Both have the same task, batch and optimizer. Run in turn by bench/splits.py, which writes the rows.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import TensorDataset

from paceline import Splits, Task
from paceline.bench.splits import LiveSplitsQuestion, measure_splits
from paceline.partition.placement import even_parts
from paceline.splits.measuring import measure
from paceline.splits.parts import make_parts
from paceline.splits.tracing import trace
from paceline.system.processors import num_cores
from paceline.trainer import make_loader
from paceline.workloads import load_task
from paceline.workloads.base import loss_metrics

HERE = Path(__file__).stem
MICRO_BATCHES = (2, 4, 8)
UPDATES, WARM_UP = 14, 3
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
    """Two wide layers, then six narrow ones."""
    return make_task("two wide layers and six narrow", (2048, 2048, 2048, *(512,) * 6))


def paceline_step_s(name: str) -> float:
    """Return the median seconds of a step over one run."""
    question = LiveSplitsQuestion(task=f"{HERE}:{name}", updates=UPDATES, only=("network",))
    (row,) = measure_splits(question).rows
    if row.step_s is None:
        sys.exit(f"{name}: {row.why}")
    return row.step_s


def torch_step_s(name: str) -> float:
    """Return the step time of the best number of micro-batches, each in two new processes."""
    medians_s = []
    for num_micro_batches in MICRO_BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "steps.json"
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc-per-node", "2", __file__, name, str(num_micro_batches), str(out)],
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            steps_s: list[float] = json.loads(out.read_text())
            medians_s.append(statistics.median(steps_s))
    return min(medians_s)


def run_rank(name: str, micro_batches: int, out: Path) -> None:
    """Run one of the two ranks."""
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
    steps_s, start_s = [], time.perf_counter()
    for inputs, targets in loader:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
        steps_s.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
    if rank == 0:
        out.write_text(json.dumps(steps_s[WARM_UP:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    run_rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
