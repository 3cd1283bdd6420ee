"""``pace.updates()`` without a number: it ends when one worker leaves it or the run ends."""

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from runs import run_script

SCRIPT = """\
import torch
from torch import nn
import paceline

pace = paceline.connect()
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = pace.prepare(model, optimizer)
turns = 0
for number in pace.updates():
    with pace.step():
        x = torch.randn(8, 3)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    turns += 1
    if IS_OVER:
        break
"""


def write(folder: Path, is_over: str, more: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("IS_OVER", is_over) + more)
    return path


@pytest.mark.parametrize("protocol", ["full-sync", "k-batch-async:2", "k-sync:1", "local-sgd:4"])
def test_the_run_ends_when_one_worker_leaves_the_loop(tmp_path: Path, protocol: str) -> None:
    script = write(tmp_path, "turns >= 20 and pace.is_main")
    run = run_script(script, tmp_path, workers=2, protocol=protocol)
    assert run.summary.ended == "the script asked for it"
    assert run.summary.updates >= 5
    if protocol in ("full-sync", "local-sgd:4"):  # elsewhere one may have made 20 turns alone
        assert {fact.ticket.member for fact in run.pushes} == {0, 1}


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_the_command_line_ends_an_endless_loop(tmp_path: Path, engine: str) -> None:
    script = write(tmp_path, "False")
    run = run_script(script, tmp_path, workers=2, updates=30, engine=engine)
    assert run.summary.updates == 30


def test_a_second_loop_after_a_left_one_is_refused_by_name(tmp_path: Path) -> None:
    more = "for number in pace.updates():\n    pass\n"
    with pytest.raises(ConfigError, match=r"leaving the loop .* ended the run.*pace\.updates\(n\)"):
        run_script(write(tmp_path, "turns == 3", more), tmp_path, workers=1)


def test_a_count_that_is_already_reached_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = "for number in pace.updates(2):\n    pass\n"
    text = SCRIPT.replace("pace.updates()", "pace.updates(3)").replace("IS_OVER", "False")
    (tmp_path / "train.py").write_text(text + more)
    run_script(tmp_path / "train.py", tmp_path, workers=1)
    assert "pace.updates(2) makes no update: the run is at version 3" in capfd.readouterr().err
