"""A stream on which several optimizers step: a stopped run is resumed."""

from pathlib import Path
from typing import Any

import torch

from runs import run_script

_TWO = """\
import sys, torch, paceline
from torch.utils.data import DataLoader, IterableDataset

class Rows(IterableDataset):
    def __iter__(self):
        yield from torch.arange(96.0, dtype=torch.float64).reshape(32, 3) / 96

pace = paceline.connect()
torch.manual_seed(2)
one, two = (torch.nn.Linear(3, 1).double() for _ in range(2))
first, second = (torch.optim.Adam(model.parameters()) for model in (one, two))
one, two, first, second, loader = pace.prepare(
    one, two, first, second, DataLoader(Rows(), batch_size=4)
)
for _ in pace.epochs(2):
    for rows in loader:
        with pace.step():
            for model, optimizer in ((one, first), (two, second)):
                optimizer.zero_grad()
                (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
pace.save()
"""


def test_a_stopped_stream_with_several_optimizers_resumes(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(_TWO)
    settings: dict[str, Any] = {"workers": 2, "engine": "inline"}
    whole = run_script(script, tmp_path / "whole", **settings)
    run_script(script, tmp_path / "cut", updates=4, **settings)
    again = {"resume": str(tmp_path / "cut" / "run"), "updates": 99}
    result = run_script(script, tmp_path / "cut", **settings, **again)
    assert result.state
    assert all(torch.equal(value, whole.state[name]) for name, value in result.state.items())
