"""Splits of a model compared with their predictions: steps, memory, and their results.

    python bench/splits.py [--rounds 4] [--only steps | memory | equal | large | torch] [--write]

    steps    `data` and `network` of four models on 2 and 3 processes, in rounds in which their runs
             take turns with what predicts them (standing.py); all other splits on 2 processes:
             predicted, then live once
    memory   100 million parameters on 2 processes: the peak of a worker, against the table
    large    510 million: what `plan --memory` advises where one copy does not fit, run for a few
             steps; the peak of any of its processes from start to end
    equal    20 steps of one model under each split, against one device (alike.py)
    torch    two stages against torch's own pipelining with the even cut (pipelines.py)

Memory and the other splits' steps are `paceline bench splits`; equality is in float64 with
momentum, weight decay and tied weights, and as a loss curve in float32. Writes results/splits.md
and a picture for each model; exits with 1 if a run did not end or gave another result.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

from alike import compare_script, compare_task
from paceline import Splits, Task
from paceline.bench.splits import LiveSplitsQuestion, measure_splits
from paceline.plan import format_bytes
from paceline.report.live_splits import LiveSplits, draw_live_splits
from paceline.report.text import three_figures
from paceline.workloads import load_task
from paceline.workloads.base import loss_metrics
from paceline.workloads.transformer import Transformer
from pipelines import measure_beside_torch
from standing import Round, measure_in_turns
from table import RESULTS, machine, say, write_table

HERE = Path(__file__).stem
MODELS: dict[str, tuple[str, int | None, int]] = {
    "the MLP": ("mlp", None, 40), "AlexNet, batches of 16": ("alexnet", 16, 9),
    "ResNet-18, batches of 16": ("resnet18", 16, 9),
    "a 6-layer transformer": (f"{HERE}:transformer6", None, 15),
}  # fmt: skip
"""Tasks, the samples of an update where they differ from the task's, and the updates of a run that
is made once, of which each worker's first three are not counted: more of short ones, to take
seconds, too."""
FEW_UPDATES = 9
"""Updates of a run that is made for its memory."""
TURNS = 12
"""Windows of each run beside torch."""
IN_TURNS = ("data", "network")
"""Splits that are measured in rounds; all others once."""
Figures = tuple[float | None, float | None, str]
"""Measured, predicted, and why one of them is missing."""
Form = Callable[[float], str]
HEADER = ("what", "workers", "split", "measured", "predicted", "predicted / measured")
LIMIT = 5 << 30
"""Bytes allowed for a worker; 510 million parameters with gradients and momentum take 6.1 GB."""


def make_task(name: str, layers: int, width: int, batch: int) -> Task:
    """Return a task of equal linear layers, sized by its bytes."""

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
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    )  # fmt: skip


def transformer6() -> Task:
    return replace(load_task("transformer", 1), model=lambda: Transformer(depth=6))


def million100() -> Task:
    return make_task("100 million", layers=16, width=2500, batch=8)


def million510() -> Task:
    return make_task("510 million", layers=10, width=7141, batch=8)


# -- live beside predicted -------------------------------------------------------------------------


def measure_live(
    task: str,
    workers: int,
    batch_size: int | None = None,
    only: tuple[str, ...] = (),
    updates: int = FEW_UPDATES,
) -> LiveSplits:
    return measure_splits(
        LiveSplitsQuestion(
            task=task,
            workers=workers,
            updates=updates,
            batch_size=batch_size,
            only=only,
        ),
        lambda line: say(f"{task}, {workers} workers, {line}"),
    )


def step_rows(rounds: int, folder: Path | None) -> Iterator[list[str]]:
    for name, (task, batch_size, updates) in MODELS.items():
        for workers in (2, 3):
            samples = batch_size or load_task(task, workers).batch_size
            in_turns = measure_in_turns(task, workers, samples, IN_TURNS, rounds)
            for split, results in in_turns.items():
                yield paired_row(f"a step, {name}", workers, split, results)
        live = measure_live(task, 2, batch_size, updates=updates)
        if folder is not None:
            picture = folder / f"splits-{task.rpartition(':')[2]}.svg"
            picture.write_text(draw_live_splits(live))
        for row in live.rows:
            if row.split not in IN_TURNS:
                figures = row.step_s, row.predicted_step_s, row.why
                yield make_row(f"a step, {name}", 2, row.split, figures, three_figures)


def paired_row(title: str, workers: int, split: str, rounds: Sequence[Round]) -> list[str]:
    """Return the row of a split whose step was predicted and measured in several rounds."""
    measured = middle_of([each.measured_s for each in rounds])
    predicted = middle_of([each.predicted_s for each in rounds])
    ratios = [each.predicted_s / each.measured_s for each in rounds]
    return [title, str(workers), split, measured, predicted, spread_of(ratios, 2)]


def spread_of(ratios: Sequence[float], digits: int) -> str:
    """Return the median, and the range of several."""
    median = f"{statistics.median(ratios):.{digits}f}"
    if len(ratios) == 1:
        return median
    return f"{median} ({min(ratios):.{digits}f} to {max(ratios):.{digits}f})"


def middle_of(times_s: Sequence[float]) -> str:
    """Return the median, and the range of several; empty: there is no time."""
    if not times_s:
        return ""
    low, middle, high = map(three_figures, (min(times_s), statistics.median(times_s), max(times_s)))
    return f"{middle} ({low} to {high})" if len(times_s) > 1 else middle


def memory_rows() -> Iterator[list[str]]:
    for result in measure_live(f"{HERE}:million100", 2).rows:
        figures = result.memory_bytes, result.predicted_memory_bytes, result.why
        yield make_row("memory, 100 million parameters", 2, result.split, figures, format_memory)


def torch_rows() -> Iterator[list[str]]:
    """Compare steps of Paceline and of torch, in turns, and Paceline's with its own."""
    for name, wanted in (("uneven", 1.15), ("coarse", 1.15), ("even", 0.98)):
        turns = measure_beside_torch(name, TURNS)
        ours, again, theirs = (middle_of(times_s) for times_s in zip(*turns, strict=True))
        title = f"a step, {load_task(f'pipelines:{name}', 2).name};"
        ratio = spread_of([turn.theirs_s / turn.ours_s for turn in turns], 3)
        ratio = f"{ratio}, >= {wanted}"
        yield [f"{title} torch's own, even; times as fast", "2", "network", ours, theirs, ratio]
        ratio = spread_of([turn.again_s / turn.ours_s for turn in turns], 3)
        yield [f"{title} A/A", "2", "network", ours, again, ratio]


def format_memory(value: float) -> str:
    return format_bytes(round(value))


def make_row(
    title: str, workers: int, split: str, figures: Figures, format_value: Form
) -> list[str]:
    measured, predicted, why = figures
    ratio = f"{predicted / measured:.2f}" if measured and predicted else ""
    cells = [why if figure is None else format_value(figure) for figure in (measured, predicted)]
    return [title, str(workers), split, *cells, ratio]


# -- a model of which one copy does not fit --------------------------------------------------------


def large_row() -> list[str]:
    """Run the advised split for 510 million parameters and 5 GiB a worker, for six updates."""
    task = f"{HERE}:million510"
    plan = ["plan", task, "-n", "2", "--memory", f"{LIMIT >> 20}MiB", "--json"]
    # In a process of its own: a plan takes gigabytes, too.
    command = [sys.executable, "-m", "paceline"]
    report = json.loads(subprocess.run([*command, *plan], stdout=PIPE, check=True).stdout)
    advised = report["advised"]
    say(f"advised: {advised}, {report['reason']}; {'; '.join(report['notes'])}")
    train = ["train", task, "--workers", "2", "--split", advised.replace("shard-", "shard:"),
             "--updates", "6", "--epochs", "6", "--checkpoint-every", "3 updates"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.Popen(
            [*command, *train, "--run-dir", f"{folder}/run"], stdout=subprocess.DEVNULL
        )
        peak = 0
        while run.poll() is None:
            peak = max([peak, *map(peak_bytes, psutil.Process(run.pid).children(recursive=True))])
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(0.2)
    if run.returncode or peak > LIMIT:
        sys.exit(f"{advised}: exit code {run.returncode}, {format_bytes(peak)}")
    title = f"most of a process, 510 million parameters, {format_bytes(LIMIT)} allowed"
    return make_row(title, 2, advised, (peak, None, "advised"), format_memory)


def peak_bytes(process: psutil.Process) -> int:
    """Return the peak resident memory of a process (proc(5), ``VmHWM``); 0 if it has ended."""
    try:
        rows = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(row.split()[1]) << 10 for row in rows if row.startswith("VmHWM")), 0)


def all_rows(options: argparse.Namespace) -> Iterator[list[str]]:
    if options.only in (None, "large"):
        yield large_row()
    if options.only in (None, "steps"):
        yield from step_rows(options.rounds, RESULTS if options.write else None)
    if options.only in (None, "memory"):
        yield from memory_rows()
    if options.only in (None, "equal"):
        yield from compare_script()
        yield from compare_task()
    if options.only in (None, "torch"):
        yield from torch_rows()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=("steps", "memory", "equal", "large", "torch"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine_note = machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends the runs it started
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    rows: list[list[str]] = []
    for cells in all_rows(options):
        print(" | ".join(cells), flush=True)
        rows.append(cells)
    if options.write:
        note = (
            "Steps: from a push to its worker's next. Of data and network, medians over "
            f"{options.rounds} rounds, and their range: in a round, two runs that stand still "
            "otherwise go on for a few steps before each thing that their prediction measures, so "
            "both see the same minutes. All others: one run each, predicted before it, of "
            f"{', '.join(f'{updates} updates of {name}' for name, (*_, updates) in MODELS.items())}"
            f"; beside torch, medians over {TURNS} windows of each run, in turn; memory: what a "
            f"process held in its steps beyond what it held before its model. {machine_note}"
        )
        write_table("splits", "Splits, beside what was predicted of them", HEADER, rows, note)


if __name__ == "__main__":
    main()
