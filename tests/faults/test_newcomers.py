"""A worker that joins a run under way has what the others have: rates, schedules, the epoch."""

from pathlib import Path

import pytest

from runs import run_script

SCRIPT = """
import os, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(1)
data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
scheduler = torch.optim.lr_scheduler.{scheduler}
loader = DataLoader(data, batch_size=8)
model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
for epoch in pace.epochs(6):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
            {in_loop}
    {after_loop}
    total = pace.sum(1)
    rate = optimizer.param_groups[0]["lr"]
    with open(f"rates-{{epoch}}", "a") as file:
        file.write(f"{{pace.worker}} {{rate!r}} {{total}}\\n")
"""


@pytest.mark.parametrize("path", ["store", "peers"])
@pytest.mark.parametrize(
    ("scheduler", "in_loop", "after_loop"),
    [
        ("ExponentialLR(optimizer, 0.7)", "", "scheduler.step()"),
        ("CosineAnnealingLR(optimizer, 72)", "scheduler.step()", ""),
    ],
    ids=["an epoch", "a version"],
)
def test_a_newcomer_has_the_rates_of_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    scheduler: str,
    in_loop: str,
    after_loop: str,
) -> None:
    """Else the run would end: pushes of one update with different rates are a conflict."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(scheduler=scheduler, in_loop=in_loop, after_loop=after_loop))
    run = run_script(
        script, tmp_path, workers=2, path=path, respawn=True, delay=("60ms",),
        fault=("kill worker 1 at update 20",),
    )  # fmt: skip
    assert run.num_epochs_ended() == 6
    assert run.summary.per_worker[1].members == 2
    lines = [line.split() for line in (tmp_path / "rates-5").read_text().splitlines()]
    assert sorted(worker for worker, _, _ in lines) == ["0", "1"]
    assert len({rate for _, rate, _ in lines}) == 1
    assert {total for _, _, total in lines} == {"2.0"}
