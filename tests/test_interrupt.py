"""Ctrl-C: the run ends at the next step with complete files and leaves no process behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import pytest

from paceline.checkpoints.folder import CheckpointFolder
from paceline.config import NAMES
from paceline.trace import read_trace
from paceline.trace.records import Ended

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
    time.sleep(0.02)  # 64 times: the launcher hears of it meanwhile
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


FORKS = """
import os
import psutil, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
if pace.worker == 1:  # as somebody does who reads other data with workers on the side
    mine = iter(DataLoader(data, num_workers=2))
    pids = [os.getpid(), *(one.pid for one in psutil.Process().children())]
    with open("forked.new", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename("forked.new", "forked")
for epoch in pace.epochs(1000000):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
"""


SLOW = """
import time
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(1000):
    for (inputs,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
    if pace.is_main:
        open("trains", "w").close()
    time.sleep(1)  # the launcher sleeps, too: it has heard the first before the second comes
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty current folder, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)
    return tmp_path


def start(*tokens: str, script: str = "", within: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """Start the command line in its own process group; ``within``: run by this command."""
    tokens = (*tokens, "--workers", "2", "--run-dir", "run", *([script] if script else []))
    return subprocess.Popen(
        [*within, sys.executable, "-m", "paceline", *tokens],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )


def wait_for(run: "subprocess.Popen[str]", path: Path) -> None:
    """Wait until the script has written a file."""
    while not path.exists():
        assert run.poll() is None
        time.sleep(0.005)


def still_running(processes: Iterable[psutil.Process], after_s: float) -> list[psutil.Process]:
    """Processes still running by then; an orphaned zombie counts as ended."""
    _, alive = psutil.wait_procs(list(processes), timeout=after_s)
    running = []
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            running += [one] if one.status() != psutil.STATUS_ZOMBIE else []
    return running


def wait_for_epoch(run: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Wait until the run trains; return its processes."""
    assert run.stdout is not None
    while not run.stdout.readline().startswith("epoch 1"):
        assert run.poll() is None
    return psutil.Process(run.pid).children(recursive=True)


def finish(
    run: "subprocess.Popen[str]", folder: Path, number: signal.Signals = signal.SIGINT
) -> str:
    """Wait for the end of an interrupted run and check the files it must leave."""
    out, err = run.communicate(timeout=60)
    assert run.returncode == 128 + number, out + err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted"
    *_, last = read_trace(folder / "trace.jsonl")
    assert isinstance(last, Ended)
    assert last.reason.partition(":")[0] == "interrupted"
    assert CheckpointFolder(folder / "checkpoints").newest().note == ""
    for name in ("model.safetensors", "summary.json", "curve.svg"):
        assert (folder / name).stat().st_size > 0
    return out


@pytest.mark.parametrize(
    ("protocol", "number"),
    [
        ("full-sync", signal.SIGINT),
        ("k-batch-sync:2", signal.SIGINT),
        ("full-sync", signal.SIGTERM),
        ("async", signal.SIGUSR1),
    ],
)
def test_ctrl_c_leaves_complete_files_and_no_process(
    protocol: str, number: signal.Signals, here: Path
) -> None:
    run = start("train", "quadratic", "--epochs", "100000", "--protocol", protocol)
    workers = wait_for_epoch(run)
    assert len(workers) >= 2
    run.send_signal(number)
    finish(run, here / "run", number)
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []


@pytest.mark.skipif(shutil.which("timeout") is None, reason="there is no command timeout here")
def test_double_signal_of_timeout_stops_a_run_softly(here: Path) -> None:
    (here / "train.py").write_text(SLOW)
    run = start("launch", script="train.py", within=("timeout", "60"))
    wait_for(run, here / "trains")
    time.sleep(0.3)
    run.terminate()  # as on a timeout: to the child, and then to its whole group
    out, err = run.communicate(timeout=60)
    assert run.returncode == 143, out + err
    assert "Traceback" not in err
    assert CheckpointFolder(here / "run" / "checkpoints").newest().note == ""


def test_ctrl_c_lets_an_evaluation_finish_and_the_script_save(here: Path) -> None:
    (here / "train.py").write_text(INTERRUPTS_ITSELF)
    out = finish(start("launch", script="train.py"), here / "run")
    assert out.count("evaluated (64.0, 64.0)") == 1


def test_ctrl_c_with_json_prints_a_summary(here: Path) -> None:
    (here / "train.py").write_text(INTERRUPTS_ITSELF)
    report = json.loads(finish(start("launch", "--json", script="train.py"), here / "run"))
    assert report["ended"] == "interrupted"
    assert report["updates"] == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_before_the_first_step_leaves_nothing(number: signal.Signals, here: Path) -> None:
    run = start("train", "quadratic", "--json", "--epochs", "100000")
    while not psutil.Process(run.pid).children():  # until it starts workers
        assert run.poll() is None
    started = psutil.Process(run.pid).children()
    run.send_signal(number)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 128 + number, out + err
    assert err == "interrupted\n"
    assert json.loads(out)["error"]["kind"] == "Interrupted"
    assert list(here.iterdir()) == []
    _, alive = psutil.wait_procs(started, timeout=5)
    assert alive == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no parent-death signal")
def test_children_of_a_killed_worker_end_with_it(here: Path) -> None:
    """Workers of a DataLoader check only every five seconds whether their parent lives."""
    (here / "train.py").write_text(FORKS)
    run = start("launch", "--protocol", "async", script="train.py")
    wait_for(run, here / "forked")
    own, *forked = [psutil.Process(int(pid)) for pid in (here / "forked").read_text().split()]
    assert len(forked) == 2
    own.kill()
    assert still_running(forked, after_s=2) == []
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no parent-death signal")
def test_no_process_is_left_after_the_launcher_is_killed(here: Path) -> None:
    (here / "train.py").write_text(FORKS)
    run = start("launch", "--protocol", "async", script="train.py")
    wait_for(run, here / "forked")
    forked = [psutil.Process(int(pid)) for pid in (here / "forked").read_text().split()]
    everybody = {*psutil.Process(run.pid).children(recursive=True), *forked}
    run.kill()
    assert still_running(everybody, after_s=2) == []
    run.communicate(timeout=60)
