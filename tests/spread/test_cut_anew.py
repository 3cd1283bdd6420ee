"""A task whose load differs from the measurement is cut again: its processes restart.

The forward passes of the second worker become slow during the run and stay slow.
"""

import re
from pathlib import Path

import pytest
import torch

from ranks import Ended, begin, end
from runs import Run

TASK = """
import os
import time
import torch
from torch import nn
from paceline import Splits, Task
from paceline.workloads.base import loss_metrics

is_second = os.environ.get("RANK") == "1"


@torch.fx.wrap
def slow(x):
    is_slow = is_second and os.path.exists("is-slow")
    # Before, all take as long: of microseconds alone, what else runs here would make the cut.
    time.sleep((0.02 if "PACELINE_ANEW" in os.environ else 0.2) if is_slow else 0.001)
    return x


class SlowsDown(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if is_second and self.num_steps == 9:
            open("is-slow", "w").close()
        return super().step(closure)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(slow(x)))
        return x


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(61, 6, generator=generator, dtype=torch.float64)
    train = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
    return Splits(train=train, test=train, source="made up")


def optimizer(held, rate):
    return SlowsDown(held, lr=rate, momentum=0.9, weight_decay=1e-2)


loss = nn.functional.cross_entropy
task = Task(
    name="six layers", model=Net, loss=loss, data=data, learning_rate=0.05, batch_size=12,
    epochs=int(os.environ.get("EPOCHS", 16)), metrics=loss_metrics(loss), optimizer=optimizer,
)
"""
EPOCHS, UPDATES_EACH = 16, 6


def by_ranks(folder: Path, num: int, *words: str, epochs: int = EPOCHS) -> Ended:
    folder.mkdir()
    (folder / "six_layers.py").write_text(TASK)
    words = ("-m", "paceline", "train", "six_layers:task", *words)
    settings = {"PYTHONPATH": str(folder), "EPOCHS": str(epochs)}
    # A restarted rank executes python again, which a forked one never did.
    return end(begin(folder, num, *words, by_python=True, **settings), folder, within_s=240.0)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Run:
    ended = by_ranks(tmp_path_factory.mktemp("one") / "run", 1)
    assert ended.code == 0, ended.said
    return ended.run


@pytest.mark.timeout(300)
def test_worker_that_becomes_slow_gets_fewer_layers(tmp_path: Path, one_device: Run) -> None:
    ended = by_ranks(tmp_path / "two", 2, "--split", "network")
    assert ended.code == 0, ended.said
    assert ": all workers restart, and the model is measured and cut again" in ended.said
    assert ended.said.count("going on with") == 1
    before, after = re.findall(r"split +network:2: (.*?); 2 micro-batches", ended.said)
    assert before != after
    # The slow time lasts from the first call of slow() to the last, so no sleep is missed.
    assert after in ("slow .. layers.0 | tanh", "slow | layers.5 .. tanh"), after
    assert ended.run.summary.updates == EPOCHS * UPDATES_EACH
    for name, tensor in ended.run.state.items():
        assert torch.allclose(tensor, one_device.state[name], rtol=1e-9, atol=1e-9), name


@pytest.mark.timeout(300)
def test_run_without_checkpoints_only_reports_the_imbalance(tmp_path: Path) -> None:
    ended = by_ranks(
        tmp_path / "two", 2, "--split", "network", "--checkpoint-every", "never", epochs=4
    )
    assert ended.code == 0, ended.said
    assert "all workers restart" not in ended.said
    assert ended.said.count("a resumed run (--resume) measures and cuts the model again") == 1
