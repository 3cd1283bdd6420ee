"""A stop between local steps: what went into the optimizers is in the weights, too."""

from pathlib import Path

import pytest
import torch

from runs import run_script

SCRIPT = """\
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
torch.manual_seed(1)
data = TensorDataset(torch.randn(96, 6), torch.randn(96, 1))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
loader = DataLoader(data, batch_size=4, shuffle=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
model, optimizer, loader, schedule = pace.prepare(model, optimizer, loader, schedule)
count = 0
for epoch in pace.epochs(2):
    for x, y in loader:
        with pace.step():
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        schedule.step()
        count += 1
        if count == 6 and Path({flag!r}).exists():
            pace.stop()
pace.save()
"""


@pytest.mark.parametrize("path", ["peers", "store"])
@pytest.mark.parametrize(
    "protocol", ["local-sgd:4", "local-sgd:4+fragments:2", "local-sgd:4+fragments:2,1"]
)
def test_a_run_stopped_between_local_steps_resumes_with_the_same_result(
    path: str, protocol: str, tmp_path: Path
) -> None:
    settings = {"workers": 2, "protocol": protocol, "path": path}
    flag, parts = tmp_path / "stop", tmp_path / "parts"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(flag=str(flag)))
    whole = run_script(script, tmp_path / "whole", **settings)
    flag.touch()
    cut = run_script(script, parts, **settings)
    assert cut.summary.ended == "the script asked for it"
    assert cut.summary.updates < whole.summary.updates
    flag.unlink()
    rest = run_script(script, parts, resume=str(parts / "run"), **settings)
    for name, value in whole.state.items():
        assert torch.equal(value, rest.state[name])
