"""A worker is killed; the others finish, each sample is used exactly once, nothing is left.

Under full-sync the parameters are those of a run without the death, to 1e-6 in float64, wherever
it dies: in the user's code, in a share between two barriers, in a job of the store. With Adam on
three workers, so that a lost step counter or a share that was not restored is seen.
"""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dying import Fault, with_fault
from paceline.config import RunSettings
from paceline.engines.base import ProcessLeft
from paceline.engines.local.engine import LocalProcesses
from paceline.engines.local.stack import StackProbe
from paceline.launch import launcher
from paceline.program import ScriptProgram
from paceline.report.live import QuietObserver
from paceline.system import limits
from reference import differ, plain_loop, replay
from runs import Run, assert_each_sample_once, train
from tiny import EPOCHS, NUM_SAMPLES, TASK, WITH_BATCH_NORM, Decaying, with_optimizer

CLOSE = 1e-6
ADAM = with_optimizer(torch.optim.Adam, 0.05)
DECAYING = with_optimizer(Decaying, 0.3)
BETWEEN_BARRIERS = [
    ("before its share is kept", 0),
    ("after its share is kept", 1),
    ("with its share half written", 0),
    ("with its share half written", 2),
    ("after its share is written", 1),
    ("at a barrier", 2),
    ("while it fills its slot", 0),
]
IN_A_JOB = [
    "before it adds to the sum",
    "after it added to the sum",
    "between two chunks of a sum",
    "before it publishes",
    "after it published",
    "while it updates",
]


def _train(task: Any, folder: Path, fault: Fault, **settings: Any) -> Run:
    settings = {"workers": 3, "protocol": "full-sync", **settings}
    run = train(with_fault(task, fault), folder, **settings)
    assert run.left == ["killed by signal 9"]
    assert run.num_epochs_ended() == EPOCHS
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    return run


@pytest.mark.parametrize("path", ["store", "peers"])
def test_full_sync_ends_as_without_the_death(tmp_path: Path, path: str) -> None:
    run = _train(TASK, tmp_path, Fault(call=4), path=path, workers=2)
    assert differ(run.state, plain_loop(TASK)) < CLOSE


@pytest.mark.parametrize("path", ["store", "peers"])
def test_another_worker_becomes_main_when_the_main_one_dies(tmp_path: Path, path: str) -> None:
    """It saves the model: otherwise there would be none to compare."""
    run = _train(TASK, tmp_path, Fault(worker=0, call=7), path=path)
    assert differ(run.state, plain_loop(TASK)) < CLOSE


SPEAKS = """
import os, signal, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
for epoch in pace.epochs(4):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
            if epoch == 2 and pace.worker == 0:
                print("my last words", end="", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"epoch {epoch} by worker {pace.worker}")
"""


@pytest.mark.parametrize("protocol", ["full-sync", "k-batch-async:2"])
def test_the_new_main_workers_output_is_shown_from_its_turn_on(
    tmp_path: Path, protocol: str
) -> None:
    (tmp_path / "train.py").write_text(SPEAKS)
    program = ScriptProgram(path=str(tmp_path / "train.py"))
    settings = RunSettings(
        run_dir=str(tmp_path / "run"),
        workers=2,
        protocol=protocol,
        device="cpu",
        threads=1,
        delay=("10ms",),  # no worker completes an epoch before the other has started
    )
    text = io.StringIO()
    launcher.launch_run(program, settings, QuietObserver(text))
    shown = [line for line in text.getvalue().splitlines() if not line.startswith("note: ")]
    assert shown[:2] == ["epoch 0 by worker 0", "epoch 1 by worker 0"]
    assert shown[2].startswith("my last words")
    assert [line[-21:] for line in shown[-2:]] == ["epoch 2 by worker 1", "epoch 3 by worker 1"]


@pytest.mark.parametrize(("point", "worker"), BETWEEN_BARRIERS)
def test_peers_restore_what_a_dead_one_had_begun(tmp_path: Path, point: str, worker: int) -> None:
    run = _train(ADAM, tmp_path, Fault(worker=worker, point=point, call=3), path="peers")
    assert "peers go on through the store" in run.notes
    assert differ(run.state, plain_loop(ADAM)) < CLOSE


@pytest.mark.parametrize("worker", [0, 1])
def test_an_epoch_ends_when_a_peer_dies_after_its_last_barrier(tmp_path: Path, worker: int) -> None:
    """Worker 0 reports the rounds; the others know them, too."""
    fault = Fault(worker=worker, point="before it tells of the epoch", call=1)
    run = _train(ADAM, tmp_path, fault, path="peers")
    assert differ(run.state, plain_loop(ADAM)) < CLOSE


@pytest.mark.parametrize("point", IN_A_JOB)
def test_another_worker_finishes_a_dead_ones_job_in_the_store(tmp_path: Path, point: str) -> None:
    """Worker 1 comes last, so it finishes updates."""
    fault = Fault(point=point, call=3)
    run = _train(ADAM, tmp_path, fault, path="store", workers=2, delay=("1=5ms",))
    assert differ(run.state, plain_loop(ADAM)) < CLOSE


@pytest.mark.parametrize(
    ("path", "point"),
    [
        ("store", "while it updates"),
        ("store", "before it publishes"),
        ("peers", "after its share is written"),
        ("peers", "with its share half written"),
    ],
)
def test_an_optimizer_that_changes_gradients_changes_them_once(
    tmp_path: Path, path: str, point: str
) -> None:
    """The repeated update starts from the gradients that the dead worker started from."""
    fault = Fault(point=point, call=3)
    run = _train(DECAYING, tmp_path, fault, path=path, workers=2, delay=("1=5ms",))
    assert differ(run.state, plain_loop(DECAYING)) < CLOSE


def test_gradients_of_a_single_push_update_are_changed_once(tmp_path: Path) -> None:
    fault = Fault(point="while it updates", call=2)
    run = _train(DECAYING, tmp_path, fault, protocol="async", delay=("20ms",))
    assert differ(run.state, replay(DECAYING, run.records)) < CLOSE


@pytest.mark.parametrize(
    ("protocol", "point"), [("k-batch-async:2", "in its model"), ("async", "before it publishes")]
)
def test_every_sample_is_used_once_after_a_death_among_async_workers(
    tmp_path: Path, protocol: str, point: str
) -> None:
    """The update equation after the trace holds through the death, with batch norm, too.

    Each worker has work at the start of an epoch, so a late one dies in the second.
    """
    fault = Fault(point=point, call=2)
    run = _train(WITH_BATCH_NORM, tmp_path, fault, protocol=protocol, delay=("20ms",))
    assert differ(run.state, replay(WITH_BATCH_NORM, run.records)) < CLOSE


def test_batch_norm_buffers_survive_the_switch_from_peers_to_the_store(tmp_path: Path) -> None:
    run = _train(WITH_BATCH_NORM, tmp_path, Fault(call=4), path="peers")
    assert differ(run.state, replay(WITH_BATCH_NORM, run.records)) < CLOSE


def test_a_run_whose_workers_all_die_ends_with_an_error(tmp_path: Path) -> None:
    from paceline.errors import WorkerError

    task = replace(TASK, name="doomed")
    with pytest.raises(WorkerError, match="worker 0 ended: killed by signal 9"):
        train(with_fault(task, Fault(worker=0, call=2)), tmp_path, workers=1)


def test_a_worker_ended_by_the_run_is_not_called_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although the kernel has just killed a process for memory."""
    counts = iter(range(10))
    monkeypatch.setattr(limits, "count_kills", lambda: next(counts))
    processes = object.__new__(LocalProcesses)
    processes._toll, processes._given_up = limits.Toll(0.0), set()
    processes._server = SimpleNamespace(kill=lambda member: None)  # type: ignore[assignment]  # it kills nobody
    processes._probes = {1: StackProbe(), 2: StackProbe()}
    processes.end(1)
    assert processes._event_of({"ended": 1, "code": -9}) == (1, ProcessLeft("killed by signal 9"))
    _, left = processes._event_of({"ended": 2, "code": -9})
    assert isinstance(left, ProcessLeft)
    assert "out of memory" in left.reason


def test_a_worker_that_could_not_be_forked_gives_the_reason() -> None:
    processes = object.__new__(LocalProcesses)
    processes._given_up, processes._probes = set(), {1: StackProbe()}
    message: Any = {"ended": 1, "code": 71, "unable": "Cannot allocate memory"}
    left = ProcessLeft("it could not be forked: Cannot allocate memory")
    assert processes._event_of(message) == (1, left)
