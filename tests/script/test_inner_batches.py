"""What `--check` writes in the place of an inner loop of `next()` computes what that loop does."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from paceline.porting.check import judge
from paceline.porting.reading import Source
from runs import run_script

SETUP = """\
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
inputs = torch.randn(48, 4, dtype=torch.float64)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
"""
PLAIN = """\
def cycle(batches):
    while True:
        for batch in batches:
            yield batch


batches = cycle(loader)
for i in range(7):
    optimizer.zero_grad()
    for _ in range(3):
        x, y = next(batches)
        loss = nn.functional.mse_loss(model(x), y)DIVIDED
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
"""
CARRIED = """\
import paceline
pace = paceline.connect()
model, optimizer, loader = pace.prepare(model, optimizer, loader, accumulate=3)
for batch in pace.updates(7, loader):
    with pace.step():
        x, y = batch
        loss = nn.functional.mse_loss(model(x), y)
        BACKWARD
        pace.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
if pace.is_main:
    torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("divided", "backward"), [(" / 3", "loss.backward()"), ("", "(3 * loss).backward()")]
)
def test_the_suggested_loop_computes_what_the_inner_loop_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int, divided: str, backward: str
) -> None:
    plain = SETUP + PLAIN.replace("DIVIDED", divided)
    reason = judge(Source(plain), "train.py").reason
    for line in ("accumulate=3)", "for batch in pace.updates(7, loader):", f"  {backward}  #"):
        assert line in reason
    (tmp_path / "plain.py").write_text(plain)
    (tmp_path / "carried.py").write_text(SETUP + CARRIED.replace("BACKWARD", backward))
    monkeypatch.setattr(sys, "argv", ["plain.py", str(tmp_path / "plain.pt")])
    runpy.run_path(str(tmp_path / "plain.py"), run_name="__main__")
    run_script(tmp_path / "carried.py", tmp_path, str(tmp_path / "end.pt"), workers=workers)
    expected, result = (torch.load(tmp_path / name) for name in ("plain.pt", "end.pt"))
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=1e-12)
