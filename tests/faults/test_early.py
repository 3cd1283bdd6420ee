"""Failures before ``prepare``: reported, and survived or ended cleanly."""

import re
from pathlib import Path

import pytest

from paceline.errors import ConfigError, WorkerError
from runs import Run, run_script

SCRIPT = """
import os, signal, sys, time, torch, paceline
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def is_first_life():
    try:
        Path(f"begun-{{pace.worker}}").touch(exist_ok=False)
        return True
    except FileExistsError:
        return False

pace = paceline.connect()
{before}
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.ones(96, 4), torch.ones(96, 1))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
for epoch in pace.epochs(2):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
if pace.is_main:
    print("main", pace.worker)
"""
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
HANG = "time.sleep(600)"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def early(folder: Path, before: str, **settings: object) -> Run:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(before=before))
    run = run_script(script, folder, **{"workers": 2, **settings})
    assert run.num_epochs_ended() == 2
    return run


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("what", [STOP, KILL, HANG], ids=["stopped", "killed", "asleep"])
def test_a_worker_that_dies_before_prepare_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, worker: int
) -> None:
    before = f"if pace.worker == {worker} and is_first_life(): {what}"
    run = early(tmp_path, before, respawn=True, stall_after=1.0)
    text = capsys.readouterr().err
    assert f"worker {worker} is gone (killed by signal 9); it begins again" in text
    assert text.count("main 0") == 1
    assert sorted({push.ticket.member for push in run.pushes}) == [1 - worker, 2]
    if what != KILL:
        does = "it is stopped" if what == STOP else r"it sleeps at train\.py:15 in <module>"
        assert re.search(
            rf"worker {worker} has not come to prepare\(\) for [0-9.]+ s: {does}.*; worker "
            rf"{1 - worker} waits for it; it is ended, and a new worker takes its place", text
        )  # fmt: skip
        assert any("has not come to prepare()" in note for note in run.notes)


def test_all_workers_may_die_before_prepare_once(tmp_path: Path) -> None:
    run = early(tmp_path, f"if is_first_life(): {KILL}", respawn=True)
    assert sorted({push.ticket.member for push in run.pushes}) == [2, 3]


@pytest.mark.timeout(40)
def test_a_worker_that_died_before_prepare_inherits_no_job(tmp_path: Path) -> None:
    before = f"""
if pace.worker == 0 and is_first_life(): {KILL}
if pace.worker == 1 and is_first_life():
    from dying import Fault, arm
    arm(None, Fault(point="before it adds to the sum", call=3))
"""
    run = early(tmp_path, before, respawn=True, protocol="k-sync:2", path="store")
    assert run.left == ["killed by signal 9"]
    assert sorted({push.ticket.member for push in run.pushes})[:2] == [1, 2]


def test_a_worker_respawned_inside_a_block_goes_first_again(tmp_path: Path) -> None:
    before = f"""
with pace.once() as is_first:
    if is_first and is_first_life(): {KILL}
    print("inside", pace.worker, is_first, flush=True)
"""
    early(tmp_path, before, respawn=True)
    logs = [(tmp_path / "run" / "logs" / f"worker-{seat}.log").read_text() for seat in (0, 1)]
    assert "inside 0 True" in logs[0]
    assert "inside 1 False" in logs[1]


def test_repeated_deaths_before_prepare_are_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerError, match="worker 1 ended: killed by signal 9"):
        early(tmp_path, f"if pace.worker == 1: {KILL}", respawn=True)
    assert "worker 1 ended 3 times before prepare()" in capsys.readouterr().err


@pytest.mark.parametrize("what", [STOP, KILL], ids=["stopped", "killed"])
def test_without_respawn_a_death_before_prepare_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    with pytest.raises(WorkerError, match="worker 1 ended: killed by signal 9"):
        early(tmp_path, f"if pace.worker == 1: {what}", stall_after=0.5)
    text = capsys.readouterr().err
    assert (what == KILL) or "it is ended, and the run with it (--respawn" in text


def test_a_script_that_ends_before_prepare_in_one_worker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker 1's script ended without prepare\(\)"):
        early(tmp_path, "if pace.worker == 1: sys.exit()")
