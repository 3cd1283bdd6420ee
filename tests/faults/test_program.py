"""Workers are handed their program; it is in no file that another user could replace."""

import pickle
from pathlib import Path

import pytest

from runs import run_script

SCRIPT = """
import os, paceline, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.ones(24, 4), torch.ones(24, 1))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=4))
for epoch in pace.epochs(2):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
"""


class Marks:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_planted_program_is_neither_run_nor_overwritten(tmp_path: Path, engine: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    victim = tmp_path / "victim"
    planted = pickle.dumps(Marks(tmp_path / "marker"))
    victim.write_bytes(planted)
    victim.chmod(0o644)
    (tmp_path / "run" / "program.pkl").symlink_to(victim)
    run = run_script(tmp_path / "train.py", tmp_path, workers=2, engine=engine)
    assert run.num_epochs_ended() == 2
    assert victim.read_bytes() == planted
    assert victim.stat().st_mode & 0o777 == 0o644
    assert not (tmp_path / "marker").exists()


def test_a_respawned_worker_runs_the_same_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = run_script(
        tmp_path / "train.py", tmp_path, workers=2, protocol="k-batch-async:2", respawn=True,
        fault=("kill worker 1 at update 2",), delay=("30ms",),
    )  # fmt: skip
    assert run.num_epochs_ended() == 2
    assert run.left == ["killed by signal 9"]
    assert not list(run.folder.glob("*.pkl"))
