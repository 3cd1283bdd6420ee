"""After ``kill -9`` of anything: no process after two seconds, and no shared memory at all."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from paceline.engines.local import process
from paceline.errors import LinkError
from paceline.events import Apply
from paceline.run import faults
from paceline.trace import read_trace
from paceline.trace.records import Ordered, Struck
from runs import assert_each_sample_once, named_memory, train
from tiny import NUM_SAMPLES, TASK

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere there is no parent-death signal"
)

SCRIPT = """
import os, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(1000000):
    for inputs, targets in loader:
        open(f"began-{pace.worker}", "w").close()
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
"""
WITHIN_S = 2.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An endless run, once each worker has a batch of its loader."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable, "-m", "paceline", "launch", "--workers", "2", "--protocol",
        "k-batch-async:2", "--device", "cpu", "--run-dir", "run", "train.py",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    end_s = time.monotonic() + 60
    while len([*tmp_path.glob("began-*")]) < 2:
        assert process.poll() is None
        assert time.monotonic() < end_s
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


def family(run: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    """All processes of a run by role; loaders' workers are children of members."""
    launcher = psutil.Process(run.pid)
    (server,) = launcher.children()
    members = sorted(server.children(), key=lambda member: member.pid)
    loaders = [child for member in members for child in member.children()]
    assert len(members) == 2
    assert len(loaders) == 2
    return {
        "launcher": launcher, "fork server": server, "worker 0": members[0], "worker 1": members[1],
        "loader 0": loaders[0], "loader 1": loaders[1],
    }  # fmt: skip


def left(people: dict[str, psutil.Process]) -> list[str]:
    """The processes that are alive ``WITHIN_S`` later."""
    _, alive = psutil.wait_procs(list(people.values()), timeout=WITHIN_S)
    return [name for name, process in people.items() if process in alive and not _is_over(process)]


def _is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("victim", "stopped"),
    [
        ("launcher", None),
        ("launcher", "worker 1"),
        ("launcher", "fork server"),
        ("fork server", None),
        ("fork server", "loader 0"),
    ],
)
def test_no_process_or_memory_is_left_when_a_parent_is_killed(
    run: subprocess.Popen[bytes], victim: str, stopped: str | None
) -> None:
    """A stopped process ends too: its death signal cannot be held back."""
    shared = named_memory()
    people = family(run)
    if stopped is not None:
        people[stopped].send_signal(signal.SIGSTOP)
    people[victim].kill()
    assert left(people) == []
    assert named_memory() <= shared


def test_a_launcher_killed_while_it_starts_leaves_no_process(tmp_path: Path) -> None:
    """Its fork server imports for some seconds then."""
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "paceline", "launch", "--device", "cpu", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        launcher = psutil.Process(process.pid)
        end_s = time.monotonic() + 60
        while not (children := launcher.children()):
            assert time.monotonic() < end_s
        process.kill()
        assert left({"fork server": children[0]}) == []


def test_a_killed_worker_takes_only_its_own_children_along(
    run: subprocess.Popen[bytes],
) -> None:
    people = family(run)
    people["worker 1"].kill()
    assert sorted(left({name: people[name] for name in ("worker 1", "loader 1")})) == []
    others = {name: process for name, process in people.items() if not name.endswith("1")}
    assert all(value.is_running() for value in others.values())
    run.send_signal(signal.SIGINT)
    run.wait(timeout=30)
    assert left(people) == []


@pytest.mark.parametrize(
    "begins",
    [
        "from paceline.checkpoints.writer import WriteQueue\n"
        "from paceline.store.memory import SharedMemory\n"
        "pid = WriteQueue(SharedMemory.create())._start().pid",
        "from paceline.engines.local.client import ForkServerClient\npid = ForkServerClient().pid",
    ],
    ids=["checkpoint writer", "fork server"],
)
def test_a_child_stopped_before_its_first_line_dies_with_its_launcher(begins: str) -> None:
    stops = "import os, signal; os.kill(pid, signal.SIGSTOP)\nprint(pid, flush=True); os._exit(0)"
    words = [sys.executable, "-c", f"{begins}\n{stops}"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=20)
    pid, end_s = int(done.stdout), time.monotonic() + 2
    try:
        while psutil.pid_exists(pid):
            assert time.monotonic() < end_s, psutil.Process(pid)
            time.sleep(0.01)
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_run_whose_launcher_was_killed_by_a_fault_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    fault = "kill launcher at update 40"
    command = [
        sys.executable, "-m", "paceline", "launch", "--workers", "2", "--device", "cpu",
        "--run-dir", "run", "--checkpoint-every", "10 updates", "--fault", fault,
        "--delay", "20ms", "train.py",  # so that a checkpoint is written before
    ]  # fmt: skip
    before = {child.pid for child in psutil.process_iter()}
    process = subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=60)
    assert process.returncode == -signal.SIGKILL
    time.sleep(WITHIN_S)
    mine = str(tmp_path)
    assert [
        child for child in psutil.process_iter() if child.pid not in before and _cwd(child) == mine
    ] == []
    records = list(read_trace(tmp_path / "run" / "trace.jsonl"))
    assert [record.text for record in records if isinstance(record, Struck)] == [fault]
    updates = [
        record
        for record in records
        if isinstance(record, Ordered) and isinstance(record.order, Apply)
    ]
    assert len(updates) >= 40
    again = [*command[:4], "--resume", "run", "--updates", "60", "--json", "train.py"]
    result = subprocess.run(again, cwd=tmp_path, stdout=subprocess.PIPE, timeout=60, check=True)
    assert json.loads(result.stdout)["updates"] == 60


def _cwd(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def test_a_full_disk_does_not_end_a_run(tmp_path: Path) -> None:
    """New trace records wait until there is room again."""
    run = train(TASK, tmp_path, workers=2, epochs=300, fault=("fill disk at 0.1s for 0.2s",))
    assert any(isinstance(record, Struck) for record in run.records)
    assert any("cannot be written (File too large): the run goes on" in note for note in run.notes)
    assert_each_sample_once(run, NUM_SAMPLES, 300)


def test_a_disk_that_stays_full_ends_the_run_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults.OuterFaults, "close", lambda self: None)
    try:
        with pytest.raises(LinkError, match=r"the end of the run could not be written to "):
            train(TASK, tmp_path, workers=2, epochs=40, fault=("fill disk at 0.1s for 60s",))
    finally:
        faults.limit_files(None)
    records = list(read_trace(tmp_path / "run" / "trace.jsonl"))
    assert any(isinstance(record, Struck) for record in records)


def test_a_flipped_bit_in_the_trace_is_found_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="the run is complete, but the trace is damaged at "):
        train(TASK, tmp_path, workers=2, epochs=300, fault=("corrupt trace.jsonl at 0.3s",))


def test_a_fork_of_the_main_thread_dies_with_it_while_another_thread_forks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member, dies = threading.get_native_id(), []
    calls: dict[str, Callable[[], None]] = {}
    monkeypatch.setattr(os, "register_at_fork", lambda **given: calls.update(given))
    monkeypatch.setattr(os, "getppid", lambda: member)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(process, "die_with_parent", lambda: dies.append(member))
    process._kill_forks_with(member)
    calls["before"]()
    other = threading.Thread(target=calls["before"])
    other.start()
    other.join()
    calls["after_in_child"]()
    assert dies == [member]
