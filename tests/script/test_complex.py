"""Complex weights are averaged like others; where no file format holds them, the run is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ConfigError
from runs import run_script

COMPLEX = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
data = TensorDataset(torch.linspace(-1, 1, 256).double().view(64, 4), torch.arange(64) % 3)
torch.manual_seed(0)
model = nn.Linear(4, 3, dtype=torch.complex128)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
for _ in pace.epochs(2):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs + 0j).abs(), targets).backward()
            optimizer.step()
torch.save([one.detach() for one in model.parameters()], f"weights-{pace.worker}.pt")
"""


@pytest.mark.parametrize(
    "settings",
    [
        {"path": "store"},
        {"path": "peers"},
        {"path": "collective"},
        {"path": "peers", "protocol": "local-sgd:1"},
        {"path": "store", "protocol": "local-sgd:1"},
    ],
    ids=str,
)
def test_complex_weights_train_as_with_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The average of local-sgd:1 steps is linear, so it is the same."""
    (tmp_path / "train.py").write_text(COMPLEX)
    results, alone = [], {"engine": "inline"}  # type: tuple[list[Any], dict[str, Any]]
    for number, chosen in enumerate((alone, {"workers": 2, **settings})):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        run_script(tmp_path / "train.py", folder, checkpoint_every="never", **chosen)
        results.append(torch.load(folder / "weights-0.pt"))
    for first, second in zip(*results, strict=True):
        assert float((first - second).abs().max()) < 1e-12


def test_dtypes_that_no_checkpoint_holds_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COMPLEX)
    with pytest.raises(ConfigError, match="a checkpoint cannot hold 'weight', which is of complex"):
        run_script(tmp_path / "train.py", tmp_path, workers=2)
