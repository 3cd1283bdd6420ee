"""A run that stops between two epochs: what the script did there after its loop is done once.

It resumes at the end of that loop, so the script runs the same lines again.
"""

import json
from pathlib import Path

import pytest

from runs import run_script

SCRIPT = """\
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

class Count:
    num = 0
    def state_dict(self):
        return {"num": self.num}
    def load_state_dict(self, state):
        self.num = state["num"]

pace = paceline.connect()
torch.manual_seed(0)
model, count = nn.Linear(3, 1).double(), Count()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
data = torch.randn(64, 3, dtype=torch.float64)
model, optimizer, loader PREPARED = pace.prepare(
    model, optimizer, DataLoader(TensorDataset(data), batch_size=8) PREPARED)
pace.keep(count=count)
for epoch in pace.epochs(4):
    for (inputs,) in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - 1.0) ** 2).mean().backward()
            optimizer.step()
    time.sleep(0.3 * pace.worker)
    STEP
    count.num += 1
    if epoch == 1 and pace.is_main and not os.path.exists("stopped"):
        open("stopped", "w").close()
        pace.stop()
rates = [group["lr"] for group in optimizer.param_groups]
found = rates, count.num, model.weight.tolist()
with open(f"{pace.worker}.json", "w") as file:
    json.dump(found, file)
"""
PREPARED = SCRIPT.replace(" PREPARED", ", scheduler")
WAYS = {
    "prepared": PREPARED.replace("STEP", "scheduler.step()"),
    "not prepared": SCRIPT.replace(" PREPARED", "").replace("STEP", "scheduler.step()"),
    "by hand": SCRIPT.replace(" PREPARED", "").replace(
        "STEP", "for group in optimizer.param_groups: group['lr'] *= 0.5"
    ),
}


def _found(folder: Path) -> list[object]:
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(2)]


@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2", "k-batch-async:1"])
@pytest.mark.parametrize("way", WAYS)
def test_work_between_epochs_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, protocol: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAYS[way])
    results = []
    for name in ("whole", "cut"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        if name == "whole":
            (folder / "stopped").touch()
        run = run_script(script, folder, workers=2, protocol=protocol)
        if name == "cut":
            assert run.summary.ended == "the script asked for it"
            run = run_script(
                script, folder, workers=2, protocol=protocol, resume=str(folder / "run")
            )
        results.append(_found(folder))
    whole, cut = results
    assert whole[0][:2] == [[0.1 * 0.5**4], 4]
    for uncut, other in zip(whole, cut, strict=True):
        assert uncut[:2] == other[:2]
        if protocol != "k-batch-async:1":
            assert uncut[2] == other[2]
