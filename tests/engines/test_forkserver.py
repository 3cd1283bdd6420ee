"""A kept server serves the next run as a new one would, and ends with the block."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from paceline.engines.local import client
from paceline.engines.local.client import warm
from paceline.engines.local.forkserver import ProcessConfig
from paceline.engines.local.process import _but_for_receivers_gone
from paceline.errors import AllGone, ConfigError, WorkerError
from paceline.launch import launcher
from paceline.wire.channel import socket_pair
from runs import run_script, train
from tiny import TASK

SCRIPT = """
import os
from pathlib import Path
import paceline
pace = paceline.connect()
threads = os.environ.get("OMP_NUM_THREADS")
Path(f"seen-{pace.worker}").write_text(f"{os.environ['COLOUR']} {threads}")
"""

STOPS_IT = """
import os, signal, torch, paceline
from torch.utils.data import DataLoader, TensorDataset
pace = paceline.connect()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(48, 2)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(1):
    for number, (x,) in enumerate(loader):
        if pace.worker == 1 and number == 2:
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        with pace.step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
"""


LOADS = """
import os, signal, torch, paceline
from torch.utils.data import DataLoader, TensorDataset
pace = paceline.connect()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(48, 2)), batch_size=4, num_workers=1)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(1):
    for number, (x,) in enumerate(loader):
        if pace.worker == 1 and number == 2 and {victim}:
            os.kill({victim}, signal.SIGKILL)
        with pace.step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
"""


OUTLIVES = """
import multiprocessing, subprocess, sys
from multiprocessing.connection import Listener
from paceline.engines.local.forkserver import ProcessConfig

def end():
    kept = Listener(family="AF_UNIX")
    print("still here", flush=True)

ended = subprocess.Popen(["true"])
ended.wait()
ProcessConfig.server = ended.pid
multiprocessing.process.current_process()._config = ProcessConfig({{}}, tempdir={folder!r})
one = multiprocessing.get_context("fork").Process(target=end)
one.start()
one.join()
"""

ENDS_LATE = """
import multiprocessing, os, shutil
from multiprocessing.connection import Listener
from paceline.engines.local.forkserver import ProcessConfig

def end():
    global kept
    kept = Listener(family="AF_UNIX")
    if not {is_there}:
        shutil.rmtree({folder!r})

ProcessConfig.server = os.getpid()
multiprocessing.process.current_process()._config = ProcessConfig({{}}, tempdir={folder!r})
one = multiprocessing.get_context("fork").Process(target=end)
one.start()
one.join()
"""

HANDS_ON_LATE = """
import multiprocessing, os, shutil
from multiprocessing.util import get_temp_dir
from paceline.engines.local.forkserver import use_temp_dir

class Batch:
    def __reduce__(self):
        get_temp_dir()
        if not {is_there}:
            shutil.rmtree({folder!r})
        raise FileNotFoundError(2, "No such file or directory")  # as the socket's bind() does

def end():
    queue = multiprocessing.Queue()
    queue.put(Batch())
    queue.close()
    queue.join_thread()

use_temp_dir({folder!r})
one = multiprocessing.get_context("fork").Process(target=end)
one.start()
one.join()
"""


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is kept."""
    monkeypatch.setattr(client, "_is_warm", False)
    monkeypatch.setattr(client, "_spare", [])


def fork_servers() -> set[int]:
    children = psutil.Process().children()
    return {
        child.pid
        for child in children
        if "paceline.engines.local.forkserver" in " ".join(child.cmdline())
    }


def test_runs_in_a_warm_block_share_one_server_that_ends_with_it(tmp_path: Path) -> None:
    before = fork_servers()
    with warm():
        train(TASK, tmp_path / "1", workers=2)
        (kept,) = fork_servers() - before
        assert psutil.Process(kept).children() == []
        run = train(TASK, tmp_path / "2", workers=3, protocol="async")
        assert fork_servers() - before == {kept}
        assert run.summary.updates > 0
    assert fork_servers() == before


def test_a_dead_server_is_replaced_and_ends_with_its_run_outside_a_block(
    tmp_path: Path,
) -> None:
    before = fork_servers()
    with warm():
        train(TASK, tmp_path / "1", workers=2)
        (kept,) = fork_servers() - before
        os.kill(kept, signal.SIGKILL)
        os.waitid(os.P_PID, kept, os.WEXITED | os.WNOWAIT)
        client._is_warm = False  # as at the end of the block
        train(TASK, tmp_path / "2", workers=2)
        assert fork_servers() == before


def test_the_next_run_has_its_own_folder_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with warm():
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        for colour, threads in (("red", None), ("green", "3")):
            folder = tmp_path / colour
            folder.mkdir()
            monkeypatch.chdir(folder)
            monkeypatch.setenv("COLOUR", colour)
            if threads is not None:
                monkeypatch.setenv("OMP_NUM_THREADS", threads)
            with pytest.raises(ConfigError, match="it trained nothing"):
                run_script(script, folder, workers=2)
            assert (folder / "seen-1").read_text() == f"{colour} {threads}"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_starting_server_ignores_signals_meant_for_the_launcher(
    capfd: pytest.CaptureFixture[str], name: str
) -> None:
    server = client.ForkServerClient()
    os.kill(server.pid, signal.Signals[name])
    try:
        server.await_message("ready")
    finally:
        server.close()
    assert capfd.readouterr().err == ""


def test_modules_in_the_working_folder_do_not_shadow_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda words, **_: begun.append(words))
        patch.chdir(tmp_path)
        client.ForkServerClient()
        patch.chdir(Path(client.__file__).parents[3])
        client.ForkServerClient()
    (tmp_path / "queue.py").write_text("raise OSError('not this one')")
    python = begun[0][: begun[0].index("-m") + 1]
    done = subprocess.run([*python, "queue"], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "-P" not in begun[1]  # Paceline may be found there only


@pytest.mark.parametrize("respawn", [True, False])
def test_a_server_killed_while_it_starts_ends_or_restarts_the_run(
    tmp_path: Path, respawn: bool
) -> None:
    server = client.ForkServerClient()
    client._spare.append(server)
    os.kill(server.pid, signal.SIGKILL)
    if not respawn:
        with pytest.raises(AllGone, match=r"forked from is gone \(killed by signal 9\)"):
            train(TASK, tmp_path, workers=2)
        return
    run = train(TASK, tmp_path, workers=2, respawn=True)
    assert run.num_epochs_ended() == TASK.epochs


def test_a_stopped_server_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise no death would be reported, and no worker could be ended."""
    monkeypatch.setattr(client, "_STOPPED_S", 0.3)
    script = tmp_path / "script.py"
    script.write_text(STOPS_IT)
    monkeypatch.chdir(tmp_path)
    run = run_script(script, tmp_path, workers=2)
    assert run.left == ["killed by signal 9"]
    assert run.num_epochs_ended() == 1
    text = capsys.readouterr().err
    assert "the process that workers are forked from was stopped; it was let go on" in text


@pytest.mark.parametrize(
    "victim", ["0", "os.getpid()", "os.getppid()"], ids=["nobody", "worker", "fork server"]
)
def test_loader_workers_leave_no_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    script = tmp_path / "script.py"
    script.write_text(LOADS.format(victim=victim))
    with suppress(AllGone) if victim == "os.getppid()" else nullcontext():
        run_script(script, tmp_path, workers=2)
    # Torch keeps files there while it looks for a compiler: those of a killed process stay.
    left = [path for path in scratch.iterdir() if not path.is_file() or path.stat().st_size]
    assert [one.name for one in left if not one.name.startswith("torch")] == []


def test_a_killed_servers_files_are_removed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only at the end of the run: the launcher may be killed, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = client.ForkServerClient()
    try:
        server.await_message("ready")
        assert list(tmp_path.iterdir()) == []
        Path(server._scratch).mkdir()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(AllGone):
            server.await_message("started")
        assert list(tmp_path.iterdir()) == []
    finally:
        server.close()


def test_the_folder_of_loader_workers_is_made_on_demand(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    config = ProcessConfig({"authkey": b""}, tempdir=str(folder)).copy()
    assert not folder.exists()
    assert config.get("tempdir") == str(folder) == config.get("tempdir")
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(folder)
    assert ProcessConfig(tempdir=str(tmp_path / "link")).get("tempdir") is None
    assert ProcessConfig().get("tempdir") is None


@pytest.mark.parametrize("is_there", [True, False])
def test_a_loader_worker_that_ends_after_its_folder_is_silent(
    tmp_path: Path, is_there: bool
) -> None:
    """A loader worker outlives its run for a while: it would remove a socket that is gone."""
    code = ENDS_LATE.format(folder=str(tmp_path / "mine"), is_there=is_there)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert list(tmp_path.glob("mine/*")) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_loader_worker_that_sends_a_batch_without_its_folder_is_silent(
    tmp_path: Path, is_there: bool
) -> None:
    """Between asking for the folder and making its socket there."""
    code = HANDS_ON_LATE.format(folder=str(tmp_path / "mine"), is_there=is_there)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ("FileNotFoundError" in done.stderr) == is_there, done.stderr
    assert is_there or done.stderr == ""


def test_a_child_that_outlives_its_worker_makes_no_folder(tmp_path: Path) -> None:
    """multiprocessing would make one (pymp-...), which nothing would remove."""
    code = OUTLIVES.format(folder=str(tmp_path / "mine"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_made_when_its_server_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(ProcessConfig, "server", ended.pid)
    assert ProcessConfig(tempdir=str(tmp_path / "mine")).get("tempdir") is None
    assert not (tmp_path / "mine").exists()


def test_a_loader_worker_is_silent_about_a_dead_receiver() -> None:
    """An error in ``resource_sharer`` is no failure; elsewhere it is."""
    reported: list[type[BaseException]] = []
    say = _but_for_receivers_gone(lambda kind, error, trace: reported.append(kind))
    for name in ("resource_sharer.py", "data.py"):
        try:
            exec(compile("raise ConnectionResetError", f"/lib/{name}", "exec"))
        except ConnectionResetError as error:
            say(type(error), error, error.__traceback__)
    assert reported == [ConnectionResetError]


def test_a_server_killed_with_unread_messages_is_gone() -> None:
    """The socket is reset then, not only closed."""
    server = client.ForkServerClient()
    try:
        server.await_message("ready")
        os.kill(server.pid, signal.SIGSTOP)
        server._socket.send(b'{"empty": 0}')
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(AllGone, match="forked from is gone"):
            server.await_message("emptied")
    finally:
        server.close()


def test_a_server_that_hung_up_is_polled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = client.ForkServerClient()
    kept, (server._socket, theirs) = server._socket, socket_pair()
    num_asked = 0

    def count(descriptors: object, timeout_s: float) -> list[int]:
        nonlocal num_asked
        num_asked += 1
        return [0]

    monkeypatch.setattr(client, "wait_for", count)
    try:
        theirs.close()
        with pytest.raises(WorkerError, match="could not be started"):
            server.await_message("ready", 0.2)
        assert num_asked == 1
    finally:
        server._socket.close()
        server._socket = kept
        server.close()


def test_runs_leave_no_descriptors_open(tmp_path: Path) -> None:
    """Also in a program that trains repeatedly: a notebook, a search for settings."""
    before = 0
    for number in range(3):
        launcher.train("quadratic", workers=2, updates=2, run_dir=str(tmp_path / str(number)))
        gc.collect()
        before = before or len(os.listdir("/dev/fd"))
    assert len(os.listdir("/dev/fd")) == before


ORPHAN = """
import os, time
from types import SimpleNamespace
from paceline.engines.local import process
from paceline.engines.local.forkserver import ForkServer, ProcessConfig

process.run_member = lambda spec, descriptors: print("it ran", flush=True)
ProcessConfig.server = os.getpid()
server = object.__new__(ForkServer)
server._launcher = SimpleNamespace(close=int)
server._wake_in = os.open(os.devnull, os.O_RDONLY)
if not os.fork():
    while os.getppid() == ProcessConfig.server:
        time.sleep(0.001)
    server._become(None, [])
"""


def test_a_member_whose_server_died_during_the_fork_ends_at_once() -> None:
    """Nothing else would end it: it would live beside the restarted run."""
    ended = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60, check=True
    )
    assert (ended.stdout, ended.stderr) == ("", "")
