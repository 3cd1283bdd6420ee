"""Splits of a model beside what was predicted of them: steps, memory, and what they come to.

    python bench/splits.py [--rounds 2] [--only steps | memory | equal | large | torch] [--write]

    steps    every split of four models on 2 and 3 processes, live beside the table
    memory   100 million parameters on 2 processes: the most a worker held, beside the table
    large    510 million: what `plan --memory` advises where one copy does not fit, run for a few
             steps; the most that any process of it held from its begin to its end
    equal    20 steps of one model split in each way, beside one device (alike.py)
    torch    two stages beside torch's own pipelining with the even cut (pipelines.py)

Steps and memory are `paceline bench splits`; equality is in float64 with momentum, weight decay and
tied weights, and as a loss curve in float32. Writes results/splits.md and a picture for each model;
ends with 1 where a run did not end, or came to something else.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

from alike import equal, equal_tasks
from paceline import Splits, Task
from paceline.bench.splits import LiveSplitsQuestion, measure_splits
from paceline.plan import format_bytes
from paceline.report.live_splits import LiveSplits, draw_live_splits
from paceline.report.text import three_figures
from paceline.workloads import load_task
from paceline.workloads.base import loss_metrics
from paceline.workloads.transformer import Transformer
from pipelines import ours_s, theirs_s
from table import RESULTS, machine, say, write_table

HERE = Path(__file__).stem
MODELS: dict[str, tuple[str, int | None]] = {
    "the MLP": ("mlp", None), "AlexNet, batches of 16": ("alexnet", 16),
    "ResNet-18, batches of 16": ("resnet18", 16),
    "a 6-layer transformer": (f"{HERE}:transformer6", None),
}  # fmt: skip
"""Tasks, and the samples of an update where they are not the task's."""
UPDATES = 9
"""Of a run, of which each worker's first three are not counted."""
Figures = tuple[float | None, float | None, str]
"""Measured, predicted, and why one is missing."""
Form = Callable[[float], str]
HEADER = ("what", "workers", "split", "measured", "predicted", "predicted / measured")
LIMIT = 5 << 30
"""Bytes of a worker: 510 million parameters with gradients and momentum take 6.1 GB."""


def made_task(name: str, layers: int, width: int, batch: int) -> Task:
    """Equal linear layers: a model for its bytes."""

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def data() -> Splits:
        rng = torch.Generator().manual_seed(0)
        inputs = torch.randn(12 * batch, width, generator=rng)
        targets = torch.randint(0, width, (12 * batch,), generator=rng)
        return Splits(train=TensorDataset(inputs, targets), test=None, source="made up")

    loss = nn.functional.cross_entropy
    return Task(
        name=name, model=model, loss=loss, data=data, learning_rate=0.01, batch_size=batch,
        epochs=1, metrics=loss_metrics(loss),
        optimizer=lambda held, rate: torch.optim.SGD(held, lr=rate, momentum=0.9),
    )  # fmt: skip


def transformer6() -> Task:
    return replace(load_task("transformer", 1), model=lambda: Transformer(depth=6))


def million100() -> Task:
    return made_task("100 million", layers=16, width=2500, batch=8)


def million510() -> Task:
    return made_task("510 million", layers=10, width=7141, batch=8)


# -- live beside predicted -------------------------------------------------------------------------


def live(task: str, workers: int, rounds: int, batch_size: int | None = None) -> LiveSplits:
    return measure_splits(
        LiveSplitsQuestion(
            task=task, workers=workers, rounds=rounds, updates=UPDATES, batch_size=batch_size
        ),
        lambda line: say(f"{task}, {workers} workers, {line}"),
    )


def steps(rounds: int, folder: Path | None) -> Iterator[list[str]]:
    for name, (task, batch_size) in MODELS.items():
        for workers in (2, 3):
            found = live(task, workers, rounds, batch_size)
            if folder is not None and workers == 2:
                picture = folder / f"splits-{task.rpartition(':')[2]}.svg"
                picture.write_text(draw_live_splits(found))
            for one in found.rows:
                figures = one.step_s, one.predicted_step_s, one.why
                yield row(f"a step, {name}", workers, one.split, figures, three_figures)


def memory() -> Iterator[list[str]]:
    for one in live(f"{HERE}:million100", 2, 1).rows:
        figures = one.memory_bytes, one.predicted_memory_bytes, one.why
        yield row("memory, 100 million parameters", 2, one.split, figures, in_bytes)


def beside_torch(rounds: int) -> Iterator[list[str]]:
    """Seconds of ours, of torch's, and how many times as fast ours is; in turn."""
    for name, least in (("uneven", 1.15), ("even", 0.98)):
        ours, theirs = [], []
        for number in range(rounds):
            say(f"beside torch, {name}, round {number + 1} of {rounds}")
            ours.append(ours_s(name))
            theirs.append(theirs_s(name))
        pairs = [b / a for a, b in zip(ours, theirs, strict=True)]
        said = f"{statistics.median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f}), >= {least}"
        middle = [three_figures(statistics.median(one)) for one in (ours, theirs)]
        what = f"a step, {load_task(f'pipelines:{name}', 2).name}; torch's own, even; times as fast"
        yield [what, "2", "network", *middle, said]


def in_bytes(value: float) -> str:
    return format_bytes(round(value))


def row(what: str, workers: int, split: str, figures: Figures, form: Form) -> list[str]:
    measured, predicted, why = figures
    ratio = f"{predicted / measured:.2f}" if measured and predicted else ""
    said = [why if one is None else form(one) for one in (measured, predicted)]
    return [what, str(workers), split, *said, ratio]


# -- a model of which one copy does not fit --------------------------------------------------------


def large() -> list[str]:
    """What is advised for 510 million parameters and 5 GiB a worker, run for six updates."""
    task = f"{HERE}:million510"
    asked = ["plan", task, "-n", "2", "--memory", f"{LIMIT >> 20}MiB", "--json"]
    command = [sys.executable, "-m", "paceline"]  # of its own: a plan takes gigabytes, too
    report = json.loads(subprocess.run([*command, *asked], stdout=PIPE, check=True).stdout)
    advised = report["advised"]
    say(f"advised: {advised}, {report['reason']}; {'; '.join(report['notes'])}")
    words = ["train", task, "--workers", "2", "--split", advised.replace("shard-", "shard:"),
             "--updates", "6", "--epochs", "6", "--checkpoint-every", "3 updates"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.Popen(
            [*command, *words, "--run-dir", f"{folder}/run"], stdout=subprocess.DEVNULL
        )
        most = 0
        while run.poll() is None:
            most = max([most, *map(peak_bytes, psutil.Process(run.pid).children(recursive=True))])
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(0.2)
    if run.returncode or most > LIMIT:
        sys.exit(f"{advised}: exit code {run.returncode}, {format_bytes(most)}")
    allowed = f"most of a process, 510 million parameters, {format_bytes(LIMIT)} allowed"
    return row(allowed, 2, advised, (most, None, "advised"), in_bytes)


def peak_bytes(process: psutil.Process) -> int:
    """The most that it has held (proc(5), ``VmHWM``); 0: it has ended."""
    try:
        rows = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(one.split()[1]) << 10 for one in rows if one.startswith("VmHWM")), 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=("steps", "memory", "equal", "large", "torch"))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    where = machine()
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    rows: list[list[str]] = []
    if asked.only in (None, "large"):
        rows.append(large())
    if asked.only in (None, "steps"):
        rows += steps(asked.rounds, RESULTS if asked.write else None)
    if asked.only in (None, "memory"):
        rows += memory()
    if asked.only in (None, "equal"):
        rows += equal()
        rows += equal_tasks()
    if asked.only in (None, "torch"):
        rows += beside_torch(asked.rounds)
    for one in rows:
        print(" | ".join(one))
    if asked.write:
        note = (
            f"Steps: medians over {asked.rounds} runs of {UPDATES} updates, from a push to its "
            "worker's next; memory: what a process held in its steps beyond what it held before "
            f"its model. {where}"
        )
        write_table("splits", "Splits, beside what was predicted of them", HEADER, rows, note)


if __name__ == "__main__":
    main()
