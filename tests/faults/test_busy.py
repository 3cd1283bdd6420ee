"""A worker busy with its own work is left alone anywhere, and named with its line.

As in a run of an hour, but in seconds: a minute elsewhere is half a second here.
"""

import re
import sys
from pathlib import Path

import pytest

from paceline.core.stats import Patience
from paceline.errors import WorkerError
from runs import Run, run_script

SCRIPT = """
import subprocess, sys, time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def compute():
    end = time.time() + {busy_s}
    while time.time() < end:
        sum(range(1000))

def sleep():
    time.sleep({busy_s})

def compile():
    code = "import time; end = time.time() + {busy_s}\\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-c", code])

pace = paceline.connect()
{before}
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.ones(96, 4), torch.ones(96, 1))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
{ready}
for epoch in pace.epochs(2):
    for number, (inputs, targets) in enumerate(loader):
        {inside}
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
    {between}
{after}
"""
BUSY_S = 1.8


@pytest.fixture(autouse=True)
def short_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SILENT_LEAST_S", "_FIRST_STEP_S", "_AGAIN_S"):
        monkeypatch.setattr(Patience, name, 0.5)
    monkeypatch.setattr(Patience, "_SILENT_STEPS", 2.0)


def script_of(folder: Path, **places: str) -> Path:
    """Write the script with these lines at these places."""
    script = folder / "train.py"
    rest = dict.fromkeys(("before", "ready", "inside", "between", "after"), "pass")
    script.write_text(SCRIPT.format(busy_s=BUSY_S, **(rest | places)))
    return script


def busy(folder: Path, *, at: str, does: str, **settings: object) -> Run:
    """A run of two workers; the second, or the main one, is busy at this place."""
    who = "pace.is_main" if at in ("ready", "between", "after") else "pace.worker == 1"
    when = " and number == 3 and not epoch" if at == "inside" else ""
    script = script_of(folder, **{at: f"if {who}{when}: {does}()"})
    run = run_script(script, folder, workers=2, **settings)
    assert run.left == []
    assert run.num_epochs_ended() == 2
    return run


@pytest.mark.parametrize(
    ("at", "does"),
    [
        ("before", "compute"), ("before", "sleep"), ("inside", "compile"), ("inside", "sleep"),
        ("between", "sleep"), ("between", "compute"), ("after", "compile"),
    ],
)  # fmt: skip
def test_a_worker_busy_for_minutes_is_not_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str, does: str
) -> None:
    busy(tmp_path, at=at, does=does)
    text = capsys.readouterr().err.splitlines()
    notes = [line for line in text if "--stall-after SECONDS" in line]
    assert notes, text
    verb = "sleeps" if does == "sleep" else "computes"
    assert any(f"it {verb} at train.py:" in note for note in notes)
    assert all(" is ended" not in note for note in text)
    if at != "after":
        assert any("wait for " in note or "waits for " in note for note in notes)


@pytest.mark.parametrize(
    ("at", "does"), [("before", "compute"), ("inside", "compute"), ("between", "compile")]
)
def test_a_computing_worker_is_not_ended_with_a_stall_limit_either(
    tmp_path: Path, at: str, does: str
) -> None:
    busy(tmp_path, at=at, does=does, stall_after=0.7)


@pytest.mark.parametrize("at", ["ready", "between"])
def test_a_waiting_worker_is_not_reported_as_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str
) -> None:
    """Worker 1 waits for the main one, which loads weights or validates after its last epoch."""
    busy(tmp_path, at=at, does="sleep")
    text = capsys.readouterr().err
    assert "worker 0 has not" in text
    assert "worker 1 has not" not in text


def test_a_sleeping_worker_may_wait_for_a_computing_one(tmp_path: Path) -> None:
    """By a file, before prepare: the others do not know."""
    waits = f"""
from pathlib import Path
done = Path({str(tmp_path / "done")!r})
if pace.worker == 1:
    compute()
    done.touch()
while not done.exists():
    time.sleep(0.3)
"""
    run = run_script(script_of(tmp_path, before=waits), tmp_path, workers=2, stall_after=0.8)
    assert run.left == []


def test_a_worker_asleep_between_epochs_is_ended_with_a_stall_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_of(tmp_path, between="if pace.worker == 1: time.sleep(600)")
    run = run_script(script, tmp_path, workers=2, stall_after=1.0)
    assert run.left == ["killed by signal 9"]
    assert run.num_epochs_ended() == 2
    text = capsys.readouterr().err
    assert re.search(
        r"worker 1 has not come to the next epoch for [0-9.]+ s: it sleeps at train\.py:\d+ in "
        r"<module>; worker 0 waits for it; it is ended, and the others do its work", text
    )  # fmt: skip


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_asleep_at_its_end_is_ended_once_others_have_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], worker: int
) -> None:
    script = script_of(tmp_path, after=f"if pace.worker == {worker}: time.sleep(600)")
    with pytest.raises(WorkerError, match=f"worker {worker} ended: killed by signal 9"):
        run_script(script, tmp_path, workers=2, stall_after=1.0)
    assert f"worker {worker} has not come to its end for" in capsys.readouterr().err


def test_a_respawned_worker_that_hangs_is_named_and_not_awaited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = "from pathlib import Path\nif pace.worker == 1:\n    try: Path('first').mkdir()\n"
    before += "    except OSError: time.sleep(600)"
    script = script_of(tmp_path, before=f"import os; os.chdir({str(tmp_path)!r})\n{before}")
    run = run_script(
        script, tmp_path, workers=2, respawn=True, delay=("60ms",),
        fault=("kill worker 1 at update 3",),
    )  # fmt: skip
    assert run.num_epochs_ended() == 2
    text = capsys.readouterr().err
    assert re.search(r"worker 1 has not come to prepare\(\) for [0-9.]+ s: it sleeps at", text)


TRACES = """if pace.worker == 1 and number == 3 and not epoch:
            code = '''import ctypes, os, sys, time
libc, pid = ctypes.CDLL(None), ctypes.c_long(os.getppid())
if libc.ptrace(ctypes.c_long(16), pid, None, None): sys.exit(1)  # attach
os.waitpid(pid.value, 0)
time.sleep(2.5)
libc.ptrace(ctypes.c_long(17), pid, None, None)  # detach
'''
            if subprocess.run([sys.executable, "-c", code]).returncode: sys.exit("not allowed")"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can tell")
def test_a_worker_held_by_a_debugger_is_never_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_of(tmp_path, inside=TRACES)
    try:
        run = run_script(script, tmp_path, workers=2, stall_after=0.8)
    except WorkerError as error:
        pytest.skip(f"processes may not trace others here: {error}")
    assert run.left == []
    assert run.num_epochs_ended() == 2
    assert re.search(r"process \d+ traces it; .*: it is left alone", capsys.readouterr().err)


def test_a_worker_asleep_before_prepare_ends_the_run_with_an_error(tmp_path: Path) -> None:
    script = script_of(tmp_path, before="if pace.worker == 1: time.sleep(600)")
    with pytest.raises(WorkerError, match="worker 1 ended: killed by signal 9"):
        run_script(script, tmp_path, workers=2, stall_after=1.0)
