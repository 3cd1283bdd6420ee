"""Who is busy with its own work is left alone at any place, and named with its line.

As a run of an hour would, in seconds: what is a minute elsewhere is half a second here.
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
    """The script with these lines at these places."""
    script = folder / "train.py"
    rest = dict.fromkeys(("before", "ready", "inside", "between", "after"), "pass")
    script.write_text(SCRIPT.format(busy_s=BUSY_S, **(rest | places)))
    return script


def busy(folder: Path, *, at: str, does: str, **settings: object) -> Run:
    """A run of two workers whose second, or main, one is busy by itself at this place."""
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
def test_nobody_is_ended_who_was_busy_for_minutes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str, does: str
) -> None:
    busy(tmp_path, at=at, does=does)
    said = capsys.readouterr().err.splitlines()
    notes = [line for line in said if "--stall-after SECONDS" in line]
    assert notes, said
    verb = "sleeps" if does == "sleep" else "computes"
    assert any(f"it {verb} at train.py:" in note for note in notes)
    assert all(" is ended" not in note for note in said)
    if at != "after":
        assert any("wait for " in note or "waits for " in note for note in notes)


@pytest.mark.parametrize(
    ("at", "does"), [("before", "compute"), ("inside", "compute"), ("between", "compile")]
)
def test_who_computes_is_not_ended_where_a_time_was_given_either(
    tmp_path: Path, at: str, does: str
) -> None:
    busy(tmp_path, at=at, does=does, stall_after=0.7)


@pytest.mark.parametrize("at", ["ready", "between"])
def test_who_waits_for_another_is_not_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str
) -> None:
    """For the main one that loads weights before its loop, or validates after its last epoch."""
    busy(tmp_path, at=at, does="sleep")
    said = capsys.readouterr().err
    assert "worker 0 has not" in said
    assert "worker 1 has not" not in said


def test_who_sleeps_may_wait_for_one_that_computes(tmp_path: Path) -> None:
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


def test_between_epochs_a_sleeper_is_ended_where_a_time_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_of(tmp_path, between="if pace.worker == 1: time.sleep(600)")
    run = run_script(script, tmp_path, workers=2, stall_after=1.0)
    assert run.left == ["killed by signal 9"]
    assert run.num_epochs_ended() == 2
    said = capsys.readouterr().err
    assert re.search(
        r"worker 1 has not come to the next epoch for [0-9.]+ s: it sleeps at train\.py:\d+ in "
        r"<module>; worker 0 waits for it; it is ended, and the others do its work", said
    )  # fmt: skip


@pytest.mark.parametrize("worker", [0, 1])
def test_so_is_one_at_its_end_when_the_others_have_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], worker: int
) -> None:
    script = script_of(tmp_path, after=f"if pace.worker == {worker}: time.sleep(600)")
    with pytest.raises(WorkerError, match=f"worker {worker} ended: killed by signal 9"):
        run_script(script, tmp_path, workers=2, stall_after=1.0)
    assert f"worker {worker} has not come to its end for" in capsys.readouterr().err


def test_a_new_life_that_hangs_is_named_and_no_run_waits_for_it(
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
    said = capsys.readouterr().err
    assert re.search(r"worker 1 has not come to prepare\(\) for [0-9.]+ s: it sleeps at", said)


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
def test_who_is_held_by_a_debugger_is_never_ended(
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


def test_before_prepare_a_sleeper_ends_the_run_in_words(tmp_path: Path) -> None:
    script = script_of(tmp_path, before="if pace.worker == 1: time.sleep(600)")
    with pytest.raises(WorkerError, match="worker 1 ended: killed by signal 9"):
        run_script(script, tmp_path, workers=2, stall_after=1.0)
