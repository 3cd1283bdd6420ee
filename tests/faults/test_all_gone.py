"""All workers die, or the process that forks them: with ``--respawn`` the run restarts.

Under full-sync the parameters are those of a run without the fault, to 1e-6 in float64.
"""

import functools
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.local.engine import LocalEngine
from paceline.errors import Interrupted, WorkerError
from paceline.run.respawn import Newcomers
from paceline.trace.records import Resumed
from reference import differ, plain_loop
from runs import Run, assert_each_sample_once, run_script, train
from tiny import NUM_SAMPLES, TASK

CLOSE = 1e-6
EPOCHS = 4
LONG = replace(TASK, epochs=EPOCHS)
EVERYBODY = ("kill worker 0 at update 9", "kill worker 1 at update 9")
PATHS = pytest.mark.parametrize("path", ["store", "peers"])

SCRIPT = """
import os, signal, time, torch, paceline
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.ones(96, 4), torch.ones(96, 1))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
for epoch in pace.epochs(3):
    for number, (inputs, targets) in enumerate(loader):
        if epoch == 1 and number == 2 and {when}:
            Path("killed").touch()
            os.kill({victim}, signal.SIGKILL)
            time.sleep(60)
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
"""


@functools.cache
def without_faults() -> Any:
    return plain_loop(LONG)


def lost_once(folder: Path, **settings: Any) -> Run:
    """A run whose workers all died at update 9."""
    settings = {"workers": 2, "delay": ("10ms",), "fault": EVERYBODY, **settings}
    run = train(LONG, folder, respawn=True, **settings)
    assert run.num_epochs_ended() == EPOCHS
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    return run


@pytest.fixture
def no_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a replacement may start before the other worker dies."""
    monkeypatch.setattr(Newcomers, "replace", lambda newcomers, member: None)


@PATHS
@pytest.mark.usefixtures("no_replacements")
def test_the_run_restarts_from_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    run = lost_once(tmp_path, path=path, checkpoint_every="3 updates")
    assert differ(run.state, without_faults()) < CLOSE
    assert len([record for record in run.records if isinstance(record, Resumed)]) == 1
    text = capsys.readouterr().err
    assert "killed by signal 9; see its log): the run begins again from update" in text
    assert any("the run begins again from update" in note for note in run.notes)


@PATHS
@pytest.mark.usefixtures("no_replacements")
def test_without_a_checkpoint_the_run_restarts_from_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    run = lost_once(tmp_path, path=path, checkpoint_every="never")
    assert differ(run.state, without_faults()) < CLOSE
    assert "the run begins again from the start" in capsys.readouterr().err


def test_a_lone_worker_is_respawned(tmp_path: Path) -> None:
    lost_once(tmp_path, workers=1, fault=EVERYBODY[:1], checkpoint_every="3 updates")


def test_without_respawn_the_run_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"worker \d ended: killed by signal 9; see its log"):
        train(LONG, tmp_path, workers=2, delay=("10ms",), fault=EVERYBODY)


def test_the_fork_servers_death_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(victim="os.getppid()", when='not Path("killed").exists()'))
    run = run_script(script, tmp_path, workers=2, respawn=True, checkpoint_every="1 epoch")
    assert run.num_epochs_ended() == 3
    text = capsys.readouterr().err
    assert "no worker is left" in text
    assert "begins again from update 12" in text


@PATHS
def test_a_death_among_sums_in_the_loop_ends_or_restarts_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    """A worker that takes the dead one's mini-batches would wait for others that wait for it."""
    script, step = tmp_path / "train.py", "            optimizer.step()\n"
    text = SCRIPT.format(victim="0", when="False")
    script.write_text(text.replace(step, f"{step}        pace.sum(1.0)\n"))
    settings = {"protocol": "full-sync", "path": path, "fault": ("kill worker 2 at update 7",)}
    with pytest.raises(WorkerError, match=r"worker 2 ended: .* in pace\.sum\(\) inside the loader"):
        run_script(script, tmp_path / "once", workers=3, **settings)
    settings |= {"respawn": True, "checkpoint_every": "3 updates"}
    run = run_script(script, tmp_path, workers=3, **settings)
    assert_each_sample_once(run, 96, 3)
    assert "the run begins again from" in capsys.readouterr().err


def test_a_signal_while_dead_workers_are_cleared_away_prevents_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All are dead and being cleared away: only this process gets TERM."""
    close = LocalEngine.close

    def close_and_hear(self: LocalEngine) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        close(self)

    monkeypatch.setattr(LocalEngine, "close", close_and_hear)
    with pytest.raises(Interrupted) as ended:
        lost_once(tmp_path, workers=1, fault=EVERYBODY[:1], checkpoint_every="3 updates")
    assert ended.value.signal == signal.SIGTERM
    assert "begins again" not in capsys.readouterr().err


def test_restarts_without_progress_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(victim="os.getpid()", when="True"))
    with pytest.raises(
        WorkerError, match=r"ended like this 3 times without getting beyond update \d+"
    ):
        run_script(script, tmp_path, workers=2, respawn=True, checkpoint_every="1 epoch")
    assert capsys.readouterr().err.count("the run begins again") == 3
