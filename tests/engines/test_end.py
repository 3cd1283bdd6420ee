"""The end of a worker: which errors of its script are reported, and which are none."""

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.context import Context
from paceline.engines.base import MemberSpec
from paceline.engines.local import process
from paceline.script import worker
from paceline.wire.channel import member_channel, socket_pair
from paceline.wire.messages import Done, Failed
from runs import run_script

LEAVES = """
import atexit, threading, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
log = open(f"log-{pace.worker}", "w")

class Model(torch.nn.Linear):  # by which the file lives as long as its module
    pass

model = Model(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2, num_workers=1)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(1):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

def save():
    time.sleep(0.3)
    log.write("thread")

atexit.register(lambda: log.write(" atexit"))
atexit.register(lambda: 1 / 0)
threading.Thread(target=save).start()
"""


class Told:
    """A channel that keeps its messages."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.send = self.hold = self.sent.append


@pytest.fixture
def spec(tmp_path: Path) -> MemberSpec:
    """The spec of the only worker, with its logs here."""
    return MemberSpec(
        member=0, seat=0, num_seats=1, threads=1, log=str(tmp_path / "logs" / "worker-0.log"),
        context=Context().write(), environment={},
    )  # fmt: skip


def end_with(error: BaseException, spec: MemberSpec, **exchange: Any) -> tuple[int, list[Any]]:
    """The exit code where the script raises this, and the messages."""
    told: Any = Told()
    seen: Any = SimpleNamespace(is_cut_short=False, say=told.send)
    vars(seen).update(exchange)
    try:
        raise error
    except BaseException as raised:  # any end
        return process.tell_end(raised, told, spec, seen), told.sent


def test_work_left_to_the_end_of_a_workers_process_is_done(tmp_path: Path) -> None:
    """A failure there is logged and changes nothing."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run = run_script(script, tmp_path, workers=2)
    assert run.left == []
    assert [(tmp_path / f"log-{seat}").read_text() for seat in range(2)] == ["thread atexit"] * 2
    assert "ZeroDivisionError" in (run.folder / "logs" / "worker-1.log").read_text()


@pytest.mark.parametrize("behind_stop", [True, False])
def test_a_worker_is_done_after_the_work_left_to_its_end(
    spec: MemberSpec, monkeypatch: pytest.MonkeyPatch, behind_stop: bool
) -> None:
    channel: Any = Told()
    seen = SimpleNamespace(is_cut_short=True, say=lambda text: None)
    monkeypatch.setattr(worker, "finish", lambda: channel.send("finished"))
    monkeypatch.setattr(worker, "current", lambda: seen)
    run = (lambda: print(1 / 0)) if behind_stop else (lambda: None)
    assert process.perform(run, channel, spec, lambda: channel.send("left")) == 0
    assert channel.sent == [*([] if behind_stop else ["finished"]), "left", Done()]


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried", "not enough memory: you tried"])
def test_an_out_of_memory_error_names_the_limit(spec: MemberSpec, words: str) -> None:
    _, (told,) = end_with(RuntimeError(words), spec)
    assert "memory allowed here: " in told.text


def raised_by(code: str) -> Exception:
    """The error that this script raises."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  whichever
        exec(code, {"torch": torch, "statistics": statistics, "save": print})
    return raised.value


@pytest.mark.parametrize("kind", [BrokenPipeError, ConnectionResetError])
def test_a_scripts_own_connection_error_is_reported(spec: MemberSpec, kind: type[OSError]) -> None:
    """From a data set over HTTP, or a program that it writes to."""
    code, (told,) = end_with(kind("of its own"), spec)
    assert code == 1
    assert isinstance(told, Failed)
    assert f"{kind.__name__}: of its own" in told.text


@pytest.mark.parametrize("says", [True, False], ids=["says", "hears"])
def test_a_worker_without_a_coordinator_reports_nothing(spec: MemberSpec, says: bool) -> None:
    ours, theirs = socket_pair()
    channel = member_channel(ours)
    theirs.close()
    with pytest.raises(ConnectionError) as gone:
        channel.send(Done()) if says else channel.receive()
    assert end_with(gone.value, spec) == (1, [])


@pytest.mark.parametrize(
    "code",
    [
        "next(iter(()))", "[].pop()", "0 / len(())", "max([])", "statistics.mean([])",
        "torch.cat([])", "torch.stack([])", "list(next(iter(())) for _ in range(1))",
        "total = 0; total.item()", "for loss in (): pass\nprint(loss)",
        "def train():\n    for loss in (): pass\n    print(loss)\ntrain()",
    ],
)  # fmt: skip
def test_errors_for_lack_of_batches_are_no_failure_after_a_stop(
    spec: MemberSpec, code: str
) -> None:
    error = raised_by(code)
    assert end_with(error, spec)[0] == 1
    code_of_end, (note, told) = end_with(error, spec, is_cut_short=True)
    assert (code_of_end, told) == (0, Done())
    assert (
        f"({type(error).__name__}): the run was stopped, so its loader had no more batches" in note
    )


@pytest.mark.parametrize(
    "code",
    [
        "torch.save({}, '/no/such/folder/model.pt')", "open('/no/such/file')", "{}['acc']",
        "model = 0; save(modle)", "None.item()", "int('one')",
        "torch.nn.Embedding(2, 2)(torch.tensor(9))",
    ],
)  # fmt: skip
def test_other_errors_after_a_stop_are_failures(spec: MemberSpec, code: str) -> None:
    code_of_end, (told,) = end_with(raised_by(code), spec, is_cut_short=True)
    assert (code_of_end, type(told)) == (1, Failed)
    assert "before that the run was stopped" in told.text
