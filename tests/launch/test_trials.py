"""Between two trials of a search: deaths, failures, and requests to end.

trial-1 [ ... ] the script's own code [ trial-2 ... ]
                ^ here, or while others wait for the next one
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meanwhile import meanwhile
from paceline.config import RunSettings
from paceline.errors import ConfigError
from paceline.launch import trials
from runs import nothing_left

Say = Callable[[str], tuple[int, str, str]]
Search = Callable[..., tuple[int, str]]

SCRIPT = """\
import os, signal, sys, time, torch
from pathlib import Path
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace, folder = paceline.connect(), Path(sys.argv[1])
data = TensorDataset(torch.rand(32, 2), torch.rand(32, 1))

def train(stop_at=-1):
    model = nn.Linear(2, 1)
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader = pace.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    for epoch in pace.epochs(2):
        for x, y in loader:
            with pace.step():
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            if pace.version == stop_at:
                pace.stop()

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def between():
    BETWEEN

for number in range(3):
    with pace.trial():
        train(STOP_AT if number == 0 else -1)
    (folder / f"done-{number}-{pace.worker}").touch()
    if number == 0:
        between()
(folder / f"over-{pace.worker}").touch()
"""


@pytest.fixture
def search(say: Say, tmp_path: Path) -> Search:
    """Run a search with two workers: its exit code and output."""

    def run(between: str, flags: str = "", stop_at: int = -1) -> tuple[int, str]:
        script = tmp_path / "search.py"
        text = SCRIPT.replace("BETWEEN", between.replace("\n", "\n    "))
        script.write_text(text.replace("STOP_AT", str(stop_at)))
        words = f"--workers 2 --device cpu --threads 1 --run-dir run {flags}"
        with nothing_left():
            code, out, err = say(f"launch {words} {script} {tmp_path}")
        assert "Traceback" not in out + err
        return code, out + err

    return run


def updates_of(say: Say) -> dict[str, int]:
    """The updates of each trial, by its report."""
    code, out, err = say("report run --json")
    assert code == 0, err
    return {trial["name"]: trial["updates"] for trial in json.loads(out)["trials"]}


def errors_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


WHOLE = {"trial-1": 8, "trial-2": 8, "trial-3": 8}


# -- deaths and failures ---------------------------------------------------------------------------


@pytest.mark.parametrize("seat", [0, 1])
def test_the_others_continue_without_a_dead_worker(
    search: Search, say: Say, tmp_path: Path, seat: int
) -> None:
    """Also where they wait in the next trial, and where the main worker dies."""
    between = f"""\
if pace.worker != {seat}:
    (folder / "enters").touch()
else:
    wait_for("enters")
    os.kill(os.getpid(), signal.SIGKILL)"""
    code, output = search(between)
    assert (code, errors_in(output)) == (0, [])
    assert f"worker {seat} is gone (killed by signal 9); the others go on" in output
    assert output.count("trial 'trial-2' begins with the 1 of 2 workers that are left") == 1
    assert updates_of(say) == WHOLE
    assert [path.name for path in tmp_path.glob("over-*")] == [f"over-{1 - seat}"]


def test_when_all_die_the_last_death_is_the_cause(search: Search, say: Say) -> None:
    code, output = search("os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 1
    (error,) = errors_in(output)
    assert error.endswith("ended: killed by signal 9; see its log")
    assert updates_of(say) == {"trial-1": 8}


@pytest.mark.parametrize("who", ["pace.worker == 1", "True"])
def test_an_exception_ends_the_run_and_names_its_line(search: Search, say: Say, who: str) -> None:
    code, output = search(f"if {who}:\n    raise ValueError('no good')")
    assert code == 1
    (error,) = errors_in(output)
    assert "failed at" in error
    assert "search.py:" in error
    assert output.count("ValueError: no good") == 1
    assert updates_of(say) == {"trial-1": 8}


def test_the_others_continue_after_an_exception_on_request(search: Search, say: Say) -> None:
    code, output = search(
        "if pace.worker == 0:\n    raise ValueError('no good')", "--on-worker-error continue"
    )
    assert (code, errors_in(output)) == (0, [])
    assert "ValueError: no good" in output
    assert "worker 0 is gone (exit 1); the others go on" in output
    assert updates_of(say) == WHOLE


def test_a_script_that_ends_while_another_continues_is_named(search: Search, say: Say) -> None:
    code, output = search("if pace.worker == 1:\n    sys.exit(0)")
    assert code == 2
    (error,) = errors_in(output)
    assert "worker 1's script ended without pace.trial('trial-2'), in which worker 0" in error
    assert updates_of(say) == {"trial-1": 8}


# -- requests to end -------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("who", ["True", "pace.worker == 1"])
def test_a_signal_between_trials_ends_all_workers_cleanly(
    search: Search, say: Say, tmp_path: Path, number: int, code: int, who: str
) -> None:
    """All in their own code, or one while the other waits in the next trial."""

    def stop_and_let_go() -> None:
        os.kill(os.getpid(), number)
        (tmp_path / "go").touch()

    with meanwhile(stop_and_let_go, tmp_path / "done-0-0", tmp_path / "done-0-1"):
        exit_code, output = search(f"if {who}:\n    wait_for('go')")
    assert (exit_code, errors_in(output)) == (code, [])
    assert output.count("and those after it do not train") == 1
    assert updates_of(say) == {"trial-1": 8, "trial-2": 0, "trial-3": 0}
    assert {path.name for path in tmp_path.glob("over-*")} == {"over-0", "over-1"}


def test_a_worker_that_does_not_react_to_a_signal_is_named_and_ended(
    search: Search, say: Say, tmp_path: Path
) -> None:
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(stop, tmp_path / "done-0-0", tmp_path / "done-0-1"):
        code, output = search("if pace.worker == 1:\n    time.sleep(3600)")
    assert (code, errors_in(output)) == (143, [])
    assert "worker 1 has not come to its end" in output
    assert updates_of(say) == {"trial-1": 8}


def test_a_stop_by_the_script_ends_its_trial_only(search: Search, say: Say) -> None:
    code, output = search("pass", stop_at=3)
    assert (code, errors_in(output)) == (0, [])
    result = updates_of(say)
    assert 3 <= result.pop("trial-1") < 8
    assert result == {"trial-2": 8, "trial-3": 8}


def test_an_interrupted_search_is_reported_and_not_restarted_in_its_folder(
    search: Search, say: Say, tmp_path: Path
) -> None:
    (tmp_path / "search.py").write_text(SCRIPT.replace("BETWEEN", "pass").replace("STOP_AT", "-1"))
    words = ["--workers", "2", "--device", "cpu", "--threads", "1", "--run-dir", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "launch", *words, "--fault",
         "kill launcher at update 3", "--delay", "200ms", "search.py", str(tmp_path)],
        cwd=tmp_path, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    code, out, err = say("report run")
    assert code == 0, err
    assert out.splitlines()[1].startswith("trial-1 ")
    assert out.splitlines()[1].endswith("not yet, or cut off")
    code, output = search("pass")
    assert code == 2
    assert "already holds a run" in output


def test_a_damaged_trace_does_not_hide_the_error_of_a_trial(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write_report(*_: object) -> None:
        raise ConfigError("damaged at trace.jsonl:3")

    monkeypatch.setattr(trials, "write_report", write_report)
    notes: list[str] = []
    any_part: Any = SimpleNamespace(
        settings=RunSettings(workers=2), trials=[], happened=[], path=tmp_path, has_begun=True,
        within=None, close=lambda: None, show=lambda: None, note=notes.append,
    )  # fmt: skip
    runs = trials.TrialRuns(any_part, any_part, any_part, any_part, any_part)
    runs._end(ValueError("the script's own"), "trial-1", any_part, any_part, any_part)
    assert notes == ["trial 'trial-1' has no report: damaged at trace.jsonl:3"]
    with pytest.raises(ConfigError, match="damaged"):
        runs._end(None, "trial-1", any_part, any_part, any_part)
