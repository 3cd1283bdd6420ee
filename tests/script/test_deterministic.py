"""``--deterministic``: the same bits each time, or an error that names the operation."""

from pathlib import Path

import pytest
import torch

from paceline.config import RunSettings
from paceline.errors import ConfigError, WorkerError
from paceline.replica.seeding import without_form
from runs import Run, run_script

SCRIPT = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
print(torch.are_deterministic_algorithms_enabled())
torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(3):
    for x, y in loader:
        with pace.step():
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2), accumulate={adds})
            optimizer.step()
pace.save()
"""


def run(folder: Path, *, adds: bool = True, protocol: str = "full-sync") -> Run:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.format(adds=adds))
    return run_script(folder / "train.py", folder, workers=2, protocol=protocol, deterministic=True)


@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2"])
def test_equal_commands_give_equal_bits(protocol: str, tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, protocol=protocol) for name in ("one", "other"))
    assert first.state.keys() == second.state.keys()
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state)
    log = (first.folder / "logs" / "worker-1.log").read_text()
    assert "True" in log


def test_an_operation_without_a_deterministic_form_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        run(tmp_path / "run", adds=False)
    message = str(caught.value)
    assert "put_, at " in message
    assert "train.py:18" in message
    assert "leave out --deterministic" in message
    assert len(message.splitlines()) == 1


def test_other_errors_name_no_operation() -> None:
    assert without_form(RuntimeError("a size is wrong")) == ""


def test_the_inline_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="deterministic sets torch's switches"):
        RunSettings(deterministic=True, engine="inline")
