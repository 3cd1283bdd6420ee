"""A worker dies between prepare and the first epoch: another lays out the store and fills it."""

import functools
from pathlib import Path
from typing import Any

import pytest

from dying import Fault, with_fault
from reference import differ, plain_loop
from runs import run_script, train
from tiny import TASK

CLOSE = 1e-6
PATHS = pytest.mark.parametrize("path", ["store", "peers"])


@functools.cache
def without_faults() -> Any:
    return plain_loop(TASK)


@pytest.mark.timeout(40)
@PATHS
@pytest.mark.parametrize("call", [1, 3])
def test_another_worker_writes_the_first_weights_when_the_main_one_dies(
    tmp_path: Path, path: str, call: int
) -> None:
    """Its first call is in prepare, its third at the start of the first epoch."""
    death = Fault(worker=0, point="before it writes its weights", call=call)
    run = train(with_fault(TASK, death), tmp_path, workers=3, path=path)
    assert run.left == ["killed by signal 9"]
    assert differ(run.state, without_faults()) < CLOSE


CHANGES = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dying import Fault, arm

pace = paceline.connect()
model = nn.Linear(2, 1, bias=False)
if pace.worker == 0:
    arm(model, Fault(worker=0, point="before it writes its weights", call=3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
loader = DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
with torch.no_grad():
    model.weight.fill_(7.0)
for epoch in pace.epochs(1):
    for (inputs,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(inputs).mean().backward()
            optimizer.step()
pace.save()
"""


@pytest.mark.timeout(40)
@PATHS
def test_weights_changed_by_the_script_survive_a_death(tmp_path: Path, path: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHANGES)
    run = run_script(script, tmp_path, workers=3, path=path)
    assert run.left == ["killed by signal 9"]
    assert run.state["weight"].tolist() == [[7.0, 7.0]]
