"""Runs of a task with ranks by 1f1b and interleaved equal one device; a death has one cause."""

from pathlib import Path

import pytest
import torch

from ranks import Ended, run_by_mpirun, run_ranks
from runs import Run

TASK = """
import torch
from torch import nn
from paceline import Splits, Task
from paceline.workloads.base import loss_metrics


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.layers[3].weight = self.layers[1].weight
        self.double()

    def forward(self, x):
        first = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x + first


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(61, 6, generator=generator, dtype=torch.float64)
    train = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
    return Splits(train=train, test=train, source="made up")


def optimizer(held, rate):
    return torch.optim.SGD(held, lr=rate, momentum=0.9, weight_decay=1e-2)


loss = nn.functional.cross_entropy
task = Task(
    name="five layers", model=Net, loss=loss, data=data, learning_rate=0.1, batch_size=12, epochs=2,
    metrics=loss_metrics(loss), optimizer=optimizer,
)
"""
CLOSE = 1e-9


def by_ranks(folder: Path, *words: str, **settings: str) -> Ended:
    folder.mkdir(exist_ok=True)
    (folder / "five_layers.py").write_text(TASK)
    words = ("-m", "paceline", "train", "five_layers:task", *words)
    return run_ranks(folder, 2, *words, PYTHONPATH=str(folder), **settings)


def assert_same(run: Run, expected: Run) -> None:
    assert run.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        assert torch.allclose(run.state[name], tensor, rtol=CLOSE, atol=CLOSE), name


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("one")
    (folder / "five_layers.py").write_text(TASK)
    ended = run_ranks(
        folder, 1, "-m", "paceline", "train", "five_layers:task", PYTHONPATH=str(folder)
    )
    assert ended.code == 0, ended.said
    return ended.run


@pytest.mark.timeout(150)
def test_worker_killed_in_a_schedule_is_named_and_the_run_resumes(
    tmp_path: Path, one_device: Run
) -> None:
    died = by_ranks(
        tmp_path, "--split", "network:1f1b", "--checkpoint-every", "4 updates",
        "--fault", "kill worker 1 at update 9",
    )  # fmt: skip
    assert died.code != 0
    assert "micro-batches by 1f1b" in died.said
    causes = [line for line in died.errors if "worker 1 ended" in line]
    assert len(causes) == 1, died.said
    went_on = by_ranks(
        tmp_path, "--split", "network:interleaved", "--resume", str(tmp_path / "run")
    )
    assert went_on.code == 0, went_on.said
    assert "micro-batches by interleaved" in went_on.said
    assert_same(went_on.run, one_device)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("name", "by"), [("network:gpipe", "gpipe"), ("network", "1f1b")])
def test_reported_losses_equal_those_of_one_device(
    tmp_path: Path, one_device: Run, name: str, by: str
) -> None:
    split = by_ranks(tmp_path, "--split", name)
    assert split.code == 0, split.said
    assert f"micro-batches by {by}," in split.said
    assert_same(split.run, one_device)
    actual, expected = mean_losses(split.run), mean_losses(one_device)
    assert len(actual) == len(expected) == 12
    assert actual == pytest.approx(expected, rel=1e-6)


def mean_losses(run: Run) -> list[float]:
    """Mean losses of each update over all samples; both workers push unless one has none left."""
    sums: dict[int, tuple[float, int]] = {}
    for push in run.pushes:
        if push.num_samples:
            total, num = sums.get(push.ticket.version, (0.0, 0))
            loss = push.loss * push.num_samples
            sums[push.ticket.version] = total + loss, num + push.num_samples
    return [total / num for _, (total, num) in sorted(sums.items())]


NORMED_SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
torch.manual_seed(3)
layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6)]
model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(6, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs = torch.randn(60, 6, dtype=torch.float64)
data = TensorDataset(inputs, inputs[:, :3].argmax(1))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=12))
for epoch in pace.epochs(2):
    for x, y in loader:
        with pace.step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
statistics = [layers[at].running_var.tolist() for at in (1, 4)]
state = model.state_dict()
assert [state[f"{at}.running_var"].tolist() for at in (1, 4)] == statistics
if pace.worker == 0:
    torch.save(state, "state.pt")
"""


@pytest.mark.timeout(150)
def test_batch_norm_trains_as_where_only_the_data_is_divided(tmp_path: Path) -> None:
    """In parts, too, each worker has its own statistics until an update takes their mean."""
    states, said = [], ""
    for name in ("data", "network"):
        (folder := tmp_path / name).mkdir()
        ended = run_by_mpirun(folder, 2, NORMED_SCRIPT, PACELINE_SPLIT=name)
        assert ended.code == 0, ended.said
        states.append(torch.load(folder / "state.pt"))
        said = " ".join(ended.said.split())
    assert "of 6 samples by itself, not the 12 of an update; its running statistics are" in said
    by_data, by_network = states
    assert by_data.keys() == by_network.keys()
    for name, expected in by_data.items():
        assert torch.allclose(by_network[name], expected, rtol=CLOSE, atol=CLOSE), name
