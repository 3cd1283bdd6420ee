"""TERM ends a run within ten seconds, whatever workers do, with a checkpoint where possible."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.checkpoints.folder import CheckpointFolder
from paceline.config import RunSettings
from paceline.errors import Interrupted, LinkError
from paceline.launch.launcher import launch_run
from paceline.program import ScriptProgram
from paceline.report.live import QuietObserver
from paceline.run import shutdown
from paceline.system.signals import SignalInterrupt
from paceline.trace import read_trace
from paceline.trace.records import Ended
from runs import Run, assert_each_sample_once, run_script

SCRIPT = """
import collections, itertools, os, signal, time, torch, paceline
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def hang():
    Path("hangs").touch()
    {hang}

def wait():
    while not Path("hangs").exists(): time.sleep(0.01)

pace = paceline.connect()
{before}
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.ones(96, 4), torch.ones(96, 1))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
for epoch in pace.epochs(3):
    for number, (inputs, targets) in enumerate(loader):
        with pace.step():
            {inside}
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
    {between}
{after}
"""
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
ASLEEP = "time.sleep(600)"
IN_C = "collections.deque(itertools.repeat(0), maxlen=0)"


def write(folder: Path, at: str, hang: str) -> Path:
    """Write the script whose worker 1 hangs here; inside an epoch another leaves it batches."""
    places = dict.fromkeys(("before", "inside", "between", "after"), "pass")
    places[at] = "if pace.worker == 1: hang()"
    if at == "inside":
        places[at] = "if epoch == 1 and number == 2: hang() if pace.worker == 1 else wait()"
    script = folder / "train.py"
    script.write_text(SCRIPT.format(hang=hang, **places))
    return script


HANGS = pytest.mark.parametrize("hang", [STOPPED, ASLEEP, IN_C], ids=["stopped", "asleep", "in C"])


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the limits: a second is a third of one."""
    monkeypatch.setattr(shutdown, "_HURRY_S", 0.4)
    monkeypatch.setattr(shutdown, "_CALL_OFF_S", 0.6)
    monkeypatch.setattr(shutdown, "_WAY_S", 1.0)
    monkeypatch.setattr(shutdown, "_END_S", 2.5)


@HANGS
@pytest.mark.parametrize(
    ("at", "protocol"),
    [("inside", "full-sync"), ("inside", "async"), ("between", "full-sync"), ("after", "async")],
    ids=["between peers", "through the store", "between epochs", "at the end"],
)
def test_a_worker_that_hangs_delays_no_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    short_limits: None,
    at: str,
    protocol: str,
    hang: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path, at, f"os.kill({os.getpid()}, signal.SIGTERM); {hang}")
    with pytest.raises(Interrupted) as end:
        run_script(script, tmp_path, workers=2, protocol=protocol, stall_after=600.0)
    assert end.value.signal == signal.SIGTERM
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").newest().note == ""
    text = capsys.readouterr().err
    *_, last = read_trace(tmp_path / "run" / "trace.jsonl")
    assert isinstance(last, Ended)
    assert last.reason == "interrupted: terminated"
    assert "worker 1" in text


@HANGS
def test_a_signal_before_prepare_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path, "before", f"os.kill({os.getpid()}, signal.SIGTERM); {hang}")
    with pytest.raises(SignalInterrupt) as end:
        run_script(script, tmp_path, workers=2)
    assert end.value.signal == signal.SIGTERM


@pytest.mark.parametrize(("at", "hang"), [("inside", IN_C), ("between", ASLEEP)])
def test_one_term_ends_the_run_within_ten_seconds(tmp_path: Path, at: str, hang: str) -> None:
    write(tmp_path, at, hang)
    command = [sys.executable, "-m", "paceline", "launch", "--workers", "2", "--device", "cpu",
               "--run-dir", "run", "--stall-after", "600", "train.py"]  # fmt: skip
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        end_s = time.monotonic() + 60
        while not (tmp_path / "hangs").exists():
            assert run.poll() is None
            assert time.monotonic() < end_s
            time.sleep(0.02)
        family = psutil.Process(run.pid).children(recursive=True)
        start_s = time.monotonic()
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=60)
        took_s = time.monotonic() - start_s
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 128 + signal.SIGTERM, output
    assert took_s < 10.0
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").newest().note == ""
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


KEEPS = """
import time
class Slow:
    def state_dict(self):
        end = time.monotonic() + 0.5
        while time.monotonic() < end: pass
        return {"a": 1.0}
    def load_state_dict(self, state): pass
@torch.inference_mode()
def validate():
    while True: torch.ones(9).sum()
pace.keep(slow=Slow())
"""


@pytest.mark.parametrize(
    "between",
    [
        "hang() if pace.is_main else validate()",
        "with pace.once() as is_first: is_first and hang()",
    ],
    ids=["all validate", "all wait for one"],
)
def test_a_worker_busy_between_epochs_still_copies_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_limits: None, between: str
) -> None:
    """All of them do; writing the checkpoint takes longer than the last worker is awaited."""
    monkeypatch.chdir(tmp_path)
    hang = f"os.kill({os.getpid()}, signal.SIGTERM)" + "\n    while True: sum(range(1000))"
    places = {"before": KEEPS, "inside": "pass", "between": between, "after": "pass"}
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(hang=hang, **places))
    with pytest.raises(Interrupted):
        run_script(script, tmp_path, workers=2, protocol="full-sync")
    result = CheckpointFolder(tmp_path / "run" / "checkpoints").newest()
    assert result.json("run.json")["version"] == 12


@pytest.mark.parametrize("path", ["store", "peers"])
@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2"])
def test_a_worker_busy_in_a_step_still_copies_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_limits: None, path: str, protocol: str
) -> None:
    """All of them do: between peers none is behind the others, and all have work."""
    monkeypatch.chdir(tmp_path)
    here = "Path(f'at-{pace.worker}')"
    asks = f"pace.is_main and os.kill({os.getpid()}, signal.SIGTERM)"
    hang = f"{here}.touch(); {asks}\n    validate()"
    inside = f"epoch == 1 and number == 3 and not {here}.exists() and hang()"
    places = {"before": KEEPS, "inside": inside, "between": "", "after": ""}
    (tmp_path / "train.py").write_text(SCRIPT.format(hang=hang, **places))
    with pytest.raises(Interrupted) as end:
        run_script(tmp_path / "train.py", tmp_path, workers=2, path=path, protocol=protocol)
    result = CheckpointFolder(tmp_path / "run" / "checkpoints").newest()
    assert result.json("run.json")["version"] == end.value.summary.updates > 0
    chosen = RunSettings(resume="run", device="cpu", workers=2, path=path, protocol=protocol)
    summary = launch_run(ScriptProgram(path="train.py"), chosen, QuietObserver())
    assert_each_sample_once(Run(folder=tmp_path / "run", summary=summary), 96, 3)


def test_an_end_that_no_worker_copied_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_limits: None
) -> None:
    """All are busy in C, for longer than they are awaited."""
    monkeypatch.chdir(tmp_path)
    hang = f"pace.is_main and os.kill({os.getpid()}, signal.SIGTERM)\n    {IN_C}"
    places = {"before": "pass", "inside": "number == 3 and hang()", "between": "", "after": ""}
    (tmp_path / "train.py").write_text(SCRIPT.format(hang=hang, **places))
    with pytest.raises(LinkError, match="no worker came to copy it; it is in no checkpoint"):
        run_script(tmp_path / "train.py", tmp_path, workers=2, path="peers")


SUMS = """
import time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()

class Slow(nn.Linear):
    def forward(self, inputs):
        time.sleep(0.4 if pace.worker == 1 else 0.0)
        return super().forward(inputs)

model = nn.Sequential(*[Slow(4, 4) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(800, 4)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(1):
    for (inputs,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(inputs).mean().backward()
            pace.sum(1.0)
            optimizer.step()
"""


def test_a_sum_before_a_step_ends_when_the_other_workers_step_is_cancelled(
    tmp_path: Path,
) -> None:
    """Worker 0 sums while worker 1 computes until its step is cancelled and leaves its peers."""
    script = tmp_path / "train.py"
    script.write_text(SUMS)
    run = run_script(script, tmp_path, workers=2, seconds=1.0)
    assert run.summary.ended == "1 seconds are over"
