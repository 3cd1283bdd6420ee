"""Ctrl-C: the run ends at the next step with whole files, and leaves no process behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.config import NAMES
from paceline.records import Ended
from paceline.trace import read_trace

INTERRUPTS_ITSELF = """
import os, signal, time
import psutil, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
launcher = psutil.Process(os.getppid()).ppid()

def count(batch):
    global launcher
    if pace.is_main and launcher:
        os.kill(launcher, signal.SIGINT)
        launcher = 0
    end_s = time.perf_counter() + 0.02  # 64 times: the launcher hears of it meanwhile
    while time.perf_counter() < end_s:
        pass
    return {"samples": (len(batch[0]), 1)}

for epoch in pace.epochs(1000):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
    totals = pace.evaluate(count, DataLoader(data, batch_size=1))
    print("evaluated", totals["samples"])
pace.save()
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder as the current one, and no setting in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)
    return tmp_path


def begin(*tokens: str, script: str = "") -> "subprocess.Popen[str]":
    """The command line in a process group of its own."""
    tokens = (*tokens, "--workers", "2", "--run-dir", "run", *([script] if script else []))
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *tokens],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )


def finish(run: "subprocess.Popen[str]", folder: Path) -> str:
    """Wait for the end of an interrupted run and check what every such run must leave."""
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, out + err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted"
    *_, last = read_trace(folder / "trace.jsonl")
    assert isinstance(last, Ended)
    assert last.reason == "interrupted"
    for name in ("model.safetensors", "summary.json", "curve.svg"):
        assert (folder / name).stat().st_size > 0
    return out


@pytest.mark.parametrize("protocol", ["full-sync", "k-batch-sync:2"])
def test_ctrl_c_ends_a_run_with_whole_files_and_no_process_left(protocol: str, here: Path) -> None:
    run = begin("train", "quadratic", "--epochs", "100000", "--protocol", protocol)
    assert run.stdout is not None
    while not run.stdout.readline().startswith("epoch 1"):
        assert run.poll() is None
    workers = psutil.Process(run.pid).children(recursive=True)
    assert len(workers) >= 2
    run.send_signal(signal.SIGINT)
    finish(run, here / "run")
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []


def test_ctrl_c_lets_an_evaluation_finish_and_the_script_save(here: Path) -> None:
    (here / "train.py").write_text(INTERRUPTS_ITSELF)
    out = finish(begin("launch", script="train.py"), here / "run")
    assert out.count("evaluated (64.0, 64.0)") == 1
