"""The result of each split of one model after 20 updates, compared with one device.

    a script   with each split, in float64 with momentum, weight decay and tied weights: its
               weights; and in float32: its loss after each update
    a task     with the pipeline schedules that need its loss: its weights

Run by bench/splits.py, which writes the rows.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import Splits, Task
from paceline.checkpoints.state import load_tensors
from paceline.workloads.base import loss_metrics
from table import say

HERE = Path(__file__).stem
SPLITS = ("data", "network:2", "layer:2", "shard:1", "shard:2", "shard:3")
SCHEDULED = ("network:2:1f1b", "network:2:interleaved")
"""Schedules that need the loss, hence a task."""
TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
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
"""Trains a model of one dtype for 20 updates; saves the loss over all samples after each."""


class Tied64(nn.Module):
    """Six float64 layers, two of which share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.layers[4].weight = self.layers[1].weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def tied64() -> Task:
    def data() -> Splits:
        rng = torch.Generator().manual_seed(1)
        inputs = torch.randn(240, 16, generator=rng, dtype=torch.float64)
        train = TensorDataset(inputs, inputs[:, :4].argmax(1))
        return Splits(train=train, test=None, source="made up")

    loss = nn.functional.cross_entropy
    return Task(
        name="tied", model=Tied64, loss=loss, data=data, learning_rate=0.1, batch_size=12, epochs=1,
        metrics=loss_metrics(loss),
        optimizer=lambda parameters, rate: torch.optim.SGD(
            parameters, lr=rate, momentum=0.9, weight_decay=1e-2
        ),
    )  # fmt: skip


class SplitResult(NamedTuple):
    """The result of a run with one split."""

    curve: list[float]
    state: dict[str, Tensor]


def compare_script() -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for dtype, tolerance in TOLERANCES.items():
            expected = train_script(folder, dtype, "")
            for split in SPLITS:
                say(f"{dtype}, {split}")
                result = train_script(folder, dtype, split)
                quantity, difference = largest_difference(result, expected, dtype)
                if not difference <= tolerance:  # NaN is too much, too
                    sys.exit(f"{split} in {dtype}: {quantity} differ by {difference:.1e}")
                yield [
                    f"{quantity} in {dtype}, 20 updates",
                    "2",
                    split,
                    f"{difference:.1e}",
                    f"< {tolerance:g}",
                    "",
                ]


def compare_task() -> Iterator[list[str]]:
    """Compare the weights of a task after 20 updates under schedules that need its loss."""
    with tempfile.TemporaryDirectory() as folder:
        states = {}
        for split in ("", *SCHEDULED):
            say(f"a task, {split or 'one device'}")
            run_dir = Path(folder) / (split.replace(":", "-") or "one")
            flags = ["--workers", "2", "--split", split] if split else ["--workers", "1"]
            subprocess.run(
                [sys.executable, "-m", "paceline", "train", f"{HERE}:tied64", *flags,
                 "--updates", "20", "--epochs", "1", "--run-dir", str(run_dir)],
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            states[split] = load_tensors(run_dir / "model.safetensors")
        for split in SCHEDULED:
            quantity, difference = largest_difference(
                SplitResult([], states[split]), SplitResult([], states[""]), "float64"
            )
            if not difference <= TOLERANCES["float64"]:
                sys.exit(f"{split}: {quantity} differ by {difference:.1e}")
            cells = [f"{difference:.1e}", f"< {TOLERANCES['float64']:g}", ""]
            yield [f"{quantity} of a task in float64, 20 updates", "2", split, *cells]


def train_script(folder: Path, dtype: str, split: str) -> SplitResult:
    out = folder / "out.pt"
    out.unlink(missing_ok=True)
    flags = ["--workers", "2", "--split", split] if split else ["--workers", "1"]
    subprocess.run(
        [sys.executable, "-m", "paceline", "launch", *flags, "--run-dir",
         str(folder / f"run-{dtype}-{split or 1}"),
         "train.py", str(out), dtype],
        cwd=folder, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return SplitResult(**torch.load(out))


def largest_difference(actual: SplitResult, expected: SplitResult, dtype: str) -> tuple[str, float]:
    """Compare weights relative to the largest of each; in float32, the loss after each update."""
    if dtype == "float32":
        pairs = zip(actual.curve, expected.curve, strict=True)
        return "loss curves", _largest([abs(a - b) for a, b in pairs])
    return "weights", _largest([
        float((weight - actual.state[name]).abs().max() / weight.abs().max())
        for name, weight in expected.state.items()
    ])  # fmt: skip


def _largest(values: Sequence[float]) -> float:
    """Return the largest value; NaN if one is: ``max`` would leave it out."""
    return float(torch.tensor(values, dtype=torch.float64).max())
