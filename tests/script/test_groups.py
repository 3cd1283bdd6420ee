"""A script that also has a branch for torch's own process group runs here without it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import WorkerError
from runs import run_script

SCRIPT = """\
import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
if {asked}:
    dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(1):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
"""
FLAG = 'int(os.environ.get("WORLD_SIZE", 1)) > 1'


def test_a_branch_for_other_launchers_is_not_taken(
    say: Callable[[str], tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(asked=FLAG))
    code, out, err = say("launch --workers 2 --device cpu train.py")
    assert code == 0, err
    assert "note: train.py:9 makes a torch.distributed process group, for other launchers" in out
    assert "ended             finished" in out


def test_a_process_group_is_refused_with_the_line_to_remove(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(asked="True"))
    with pytest.raises(WorkerError) as caught:
        run_script(script, tmp_path, workers=2)
    message = str(caught.value)
    assert "train.py:9" in message
    assert "MASTER_ADDR expected" in message
    assert "leave that line out, and use paceline.connect() instead" in message
    assert len(message.splitlines()) <= 12


def test_a_file_that_every_worker_writes_is_noted_once(
    say: Callable[[str], tuple[int, str, str]], tmp_path: Path
) -> None:
    script = SCRIPT.format(asked="False") + 'torch.save(model.state_dict(), "model.pt")\n'
    (tmp_path / "train.py").write_text(script)
    note = "note: train.py:20 torch.save(...) runs in every worker, on the same files"
    assert say("launch --workers 2 --device cpu train.py")[1].count(note) == 1
    assert note not in say("launch --workers 1 --device cpu train.py")[1]
