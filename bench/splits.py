"""Splits of a model beside what was predicted of them: steps, memory, and what they come to.

    python bench/splits.py [--rounds 3] [--only steps | memory | equal | large] [--write]

    steps    every split of four models on 2 and 3 processes, live beside the table
    memory   100 million parameters on 2 processes: the most a worker held, beside the table
    large    510 million: what `plan --memory` advises where one copy does not fit, run for a few
             steps; the most that any process of it held from its begin to its end
    equal    20 steps of one model split in each way, beside one device

Steps and memory are `paceline bench splits`; equality is in float64 with momentum, weight decay and
tied weights, and as a loss curve in float32. Writes results/splits.md and a picture for each model;
ends with 1 where a run did not end, or came to something else. Above 300 lines with its script.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import Splits, Task
from paceline.bench.splits import LiveSplitsQuestion, measure_splits
from paceline.plan import format_bytes
from paceline.predict.split_models import SplitQuestion
from paceline.predict.splitting import plan_splits
from paceline.report.live_splits import LiveSplits, draw_live_splits
from paceline.report.text import three_figures
from paceline.workloads import load_task
from paceline.workloads.base import loss_metrics
from paceline.workloads.transformer import Transformer
from table import RESULTS, machine, write_table

HERE = Path(__file__).stem
MODELS = {
    "the MLP": "mlp", "AlexNet": "alexnet", "ResNet-18": "resnet18",
    "a 6-layer transformer": f"{HERE}:transformer6",
}  # fmt: skip
Figures = tuple[float | None, float | None, str]
"""Measured, predicted, and why one is missing."""
Form = Callable[[float], str]
HEADER = ("what", "workers", "split", "measured", "predicted", "predicted / measured")
LIMIT = 5 << 30
"""Bytes of a worker: 510 million parameters with gradients and momentum take 6.1 GB."""
SPLITS = ("data", "network:2", "layer:2", "shard:1", "shard:2", "shard:3")
CLOSE = {"float64": 1e-6, "float32": 1e-3}
SCRIPT = """
import sys
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

out, kind = sys.argv[1], getattr(torch, sys.argv[2])
pace = paceline.connect()
torch.manual_seed(3)
rng = torch.Generator().manual_seed(1)
inputs = torch.randn(240, 16, generator=rng, dtype=torch.float64).to(kind)
targets = inputs[:, :4].argmax(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.wide, self.narrow, self.out = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 4)
        self.third.weight = self.second.weight
        self.to(kind)

    def forward(self, x):
        x = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return self.out(self.narrow(torch.relu(self.wide(x))))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=12, shuffle=True)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
curve = []
for epoch in pace.epochs(1):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            curve.append(float(nn.functional.cross_entropy(model(inputs), targets)))
state = model.state_dict()
if pace.is_main:
    torch.save({"curve": curve, "state": state}, out)
"""
"""A model of one kind of numbers, trained for 20 updates; its loss over all samples after each."""


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


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def live(task: str, workers: int, rounds: int) -> LiveSplits:
    return measure_splits(
        LiveSplitsQuestion(task=task, workers=workers, rounds=rounds),
        lambda line: say(f"{task}, {workers} workers, {line}"),
    )


def steps(rounds: int, folder: Path | None) -> Iterator[list[str]]:
    for name, task in MODELS.items():
        for workers in (2, 3):
            found = live(task, workers, rounds)
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
    report = plan_splits(
        SplitQuestion(spec=task, num_workers=2, memory_bytes=LIMIT, schedule="gpipe")
    )
    advised = report.table.advised
    say(f"advised: {advised.name}, {report.table.reason}; {'; '.join(report.notes)}")
    words = ["train", task, "--workers", "2", "--split", advised.name.replace("shard-", "shard:"),
             "--updates", "6", "--epochs", "6", "--checkpoint-every", "never"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.Popen(
            [sys.executable, "-m", "paceline", *words, "--run-dir", f"{folder}/run"],
            stdout=subprocess.DEVNULL,
        )
        most = 0
        while run.poll() is None:
            most = max([most, *map(peak_bytes, psutil.Process(run.pid).children(recursive=True))])
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(0.2)
    if run.returncode or most > LIMIT:
        sys.exit(f"{advised.name}: exit code {run.returncode}, {format_bytes(most)}")
    allowed = f"most of a process, 510 million parameters, {format_bytes(LIMIT)} allowed"
    return row(allowed, 2, advised.name, (most, None, "advised"), in_bytes)


def peak_bytes(process: psutil.Process) -> int:
    """The most that it has held (proc(5), ``VmHWM``); 0: it has ended."""
    try:
        rows = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(one.split()[1]) << 10 for one in rows if one.startswith("VmHWM")), 0)


# -- what splits come to ---------------------------------------------------------------------------


class Ended(NamedTuple):
    """What a run came to."""

    curve: list[float]
    state: dict[str, Tensor]


def equal() -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for kind, close in CLOSE.items():
            expected = trained(folder, kind, "")
            for split in SPLITS:
                say(f"{kind}, {split}")
                found = trained(folder, kind, split)
                what, far = farthest(found, expected, kind)
                if far > close:
                    sys.exit(f"{split} in {kind}: {what} differ by {far:.1e}")
                yield [
                    f"{what} in {kind}, 20 updates",
                    "2",
                    split,
                    f"{far:.1e}",
                    f"< {close:g}",
                    "",
                ]


def trained(folder: Path, kind: str, split: str) -> Ended:
    out = folder / "out.pt"
    out.unlink(missing_ok=True)
    words = ["--workers", "2", "--split", split] if split else ["--workers", "1"]
    subprocess.run(
        [sys.executable, "-m", "paceline", "launch", *words, "--run-dir",
         str(folder / f"run-{kind}-{split or 1}"),
         "train.py", str(out), kind],
        cwd=folder, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return Ended(**torch.load(out))


def farthest(found: Ended, expected: Ended, kind: str) -> tuple[str, float]:
    """Weights, relative to the largest of each; of 32 bits the loss after each update."""
    if kind == "float32":
        pairs = zip(found.curve, expected.curve, strict=True)
        return "loss curves", max(abs(a - b) for a, b in pairs)
    far = 0.0
    for name, one in expected.state.items():
        far = max(far, float((one - found.state[name]).abs().max() / one.abs().max()))
    return "weights", far


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("steps", "memory", "equal", "large"))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    where = machine()
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    rows: list[list[str]] = []
    if asked.only in (None, "large"):
        rows.append(large())  # first: while this process holds little, which is taken off the limit
    if asked.only in (None, "steps"):
        rows += steps(asked.rounds, RESULTS if asked.write else None)
    if asked.only in (None, "memory"):
        rows += memory()
    if asked.only in (None, "equal"):
        rows += equal()
    for one in rows:
        print(" | ".join(one))
    if asked.write:
        note = (
            f"Steps: medians over {asked.rounds} runs, from a worker's push to its next; memory: "
            f"what a process held in its steps beyond what it held before its model. {where}"
        )
        write_table("splits", "Splits, beside what was predicted of them", HEADER, rows, note)


if __name__ == "__main__":
    main()
