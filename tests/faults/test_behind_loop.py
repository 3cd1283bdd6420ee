"""The main worker is killed after its loop: the run has ended, its script has not."""

from pathlib import Path
from textwrap import indent

import pytest

from paceline.errors import ScriptLost
from runs import run_script

SCRIPT = """\
import os, signal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def die():
    if pace.is_main and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""
STEP = """\
with pace.step():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(8, 3)), torch.ones(8, 1)).backward()
    optimizer.step()
    pass
"""
EPOCHS = f"""\
model, optimizer, loader = pace.prepare(
    model, optimizer, DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=8))
for epoch in pace.epochs(2):
    for batch in loader:
{indent(STEP, " " * 8)}
"""
UPDATES = f"""\
model, optimizer = pace.prepare(model, optimizer)
for number in pace.updates(20):
{indent(STEP, " " * 4)}
"""
ENDLESS = UPDATES.replace("20", "") + "    if pace.version >= 20 and pace.is_main:\n        break\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT + text)
    return path


@pytest.mark.parametrize("loop", [EPOCHS, UPDATES, ENDLESS], ids=["epochs", "updates", "endless"])
@pytest.mark.parametrize("protocol", ["full-sync", "k-batch-async:2"])
def test_a_death_that_may_lose_the_scripts_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str, protocol: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tail = "die()\nimport time\ntime.sleep(0.5)\n"  # the other one is there when it dies
    with pytest.raises(ScriptLost, match="worker 0 ended: killed by signal 9, after the last"):
        run_script(write(tmp_path, loop + tail), tmp_path, workers=2, protocol=protocol)


@pytest.mark.parametrize("loop", [EPOCHS, UPDATES], ids=["epochs", "updates"])
def test_before_the_end_another_worker_becomes_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = loop.replace("pass", "if pace.version >= 3: die()")
    tail = "if pace.is_main:\n    open('saved', 'w').close()\n"
    run = run_script(write(tmp_path, text + tail), tmp_path, workers=2)
    assert run.summary.ended == "finished"
    assert (tmp_path / "died").exists()
    assert (tmp_path / "saved").exists()
