"""What splits of one model come to after 20 updates, beside one device.

    a script   in each way, in float64 with momentum, weight decay and tied weights: its weights;
               and in float32 its loss after each update
    a task     by the schedules of a pipeline that need its loss: its weights

Run by bench/splits.py, which has the rows.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
"""Of a task, whose loss is known."""
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


class Tied64(nn.Module):
    """Six layers of 64-bit numbers, two of them with one weight."""

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
        optimizer=lambda held, rate: torch.optim.SGD(
            held, lr=rate, momentum=0.9, weight_decay=1e-2
        ),
    )  # fmt: skip


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


def equal_tasks() -> Iterator[list[str]]:
    """Weights of a task that has trained for 20 updates by schedules that need its loss."""
    with tempfile.TemporaryDirectory() as folder:
        states = {}
        for split in ("", *SCHEDULED):
            say(f"a task, {split or 'one device'}")
            run = Path(folder) / (split.replace(":", "-") or "one")
            words = ["--workers", "2", "--split", split] if split else ["--workers", "1"]
            subprocess.run(
                [sys.executable, "-m", "paceline", "train", f"{HERE}:tied64", *words,
                 "--updates", "20", "--epochs", "1", "--run-dir", str(run)],
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            states[split] = load_tensors(run / "model.safetensors")
        for split in SCHEDULED:
            what, far = farthest(Ended([], states[split]), Ended([], states[""]), "float64")
            if far > CLOSE["float64"]:
                sys.exit(f"{split}: {what} differ by {far:.1e}")
            said = [f"{far:.1e}", f"< {CLOSE['float64']:g}", ""]
            yield [f"{what} of a task in float64, 20 updates", "2", split, *said]


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
