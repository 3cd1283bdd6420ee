"""A lack of memory or open files is named, and nothing is left behind."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")

LOOP = """
import time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
{before}
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, num_workers={loaders})
model, optimizer, loader = pace.prepare(model, optimizer, loader)
taken = []
for epoch in pace.epochs(3):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
    {after}
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; its name is short, since it is part of socket names."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def left(temporary: Path) -> list[Path]:
    """Its contents, except torch's files for later compilation."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor")]


def launch(
    folder: Path, *flags: str, loaders: int = 0, before: str = "", after: str = "pass",
    workers: int = 2,
    limit: Callable[[], None] | None = None,
) -> "subprocess.Popen[str]":  # fmt: skip
    (folder / "train.py").write_text(LOOP.format(loaders=loaders, before=before, after=after))
    words = [sys.executable, "-m", "paceline", "launch", "--workers", str(workers)]
    return subprocess.Popen(
        [*words, "--device", "cpu", "--run-dir", "run", *flags, "train.py"],
        cwd=folder, preexec_fn=limit,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end_of(process: "subprocess.Popen[str]") -> tuple[int, str]:
    out, errors = process.communicate(timeout=90)
    assert "Traceback" not in out + errors
    return process.returncode, out + errors


def test_too_few_open_files_are_named_before_the_start(tmp_path: Path) -> None:
    few = launch(tmp_path, limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30)))
    code, output = end_of(few)
    assert code == 2
    assert "2 workers need 54 open files, but 30 are allowed (ulimit -n)" in output


def test_the_limit_of_open_files_is_raised_where_allowed(tmp_path: Path) -> None:
    process = launch(tmp_path, limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (30, 500)))
    assert end_of(process)[0] == 0


def test_the_first_worker_refuses_more_workers_than_samples_in_a_batch(tmp_path: Path) -> None:
    """Before the others get that far and take memory."""
    process = launch(tmp_path, workers=12, before="if pace.worker: time.sleep(600)")
    code, output = end_of(process)
    assert code == 2
    assert "8 samples an update cannot be shared by 12 mini-batches" in output


def test_too_little_memory_to_import_torch_is_named(tmp_path: Path) -> None:
    most = 300 << 20
    code, output = end_of(
        launch(tmp_path, limit=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)))
    )
    assert code == 1
    assert "300.0 MiB by ulimit -v" in output


def test_a_fork_server_that_cannot_import_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "paceline.engines.local.forkserver"
    lines = f"import sys\nif '{name}' in sys.orig_argv: sys.modules['torch'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(lines)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, output = end_of(launch(tmp_path))
    assert code == 1
    assert "error: workers cannot be started: ModuleNotFoundError: import of torch halted" in output


def test_a_worker_out_of_memory_names_the_limit(tmp_path: Path) -> None:
    most = 8 << 30
    code, output = end_of(launch(
        tmp_path, after="taken.append(torch.zeros(2 << 30))",
        limit=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)),
    ))  # fmt: skip
    assert code == 1
    assert "memory allowed here: 8.0 GiB by ulimit -v" in output


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of version 1 or 2 of our own, where we may make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "memory" or not kinds:
            top = Path("/sys/fs/cgroup") / kinds / path.lstrip("/")
            folder = top / f"paceline-test-{os.getpid()}"
            with contextlib.suppress(OSError):
                folder.mkdir()
                if any(folder.glob("memory.*")):
                    yield folder
                    _remove(folder)
                    return
                folder.rmdir()
    pytest.skip("no control group can be made here")


def _remove(folder: Path) -> None:
    for _ in range(50):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return


def test_a_worker_killed_by_the_kernel_for_memory_is_named_with_the_limit(
    tmp_path: Path, group: Path
) -> None:
    """One worker takes more than all may: it alone is killed, and the reason is reported."""
    most = group / "memory.limit_in_bytes"
    limit = most if most.exists() else group / "memory.max"
    limit.write_text(str(1200 << 20))
    for name in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
        with contextlib.suppress(OSError):
            (group / name).write_text("0" if "swap" in name else str(1200 << 20))

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    more = "taken += [torch.ones(4 << 28)] if pace.worker == 1 else []"
    code, output = end_of(launch(tmp_path, after=more, limit=enter))
    assert "killed by signal 9, out of memory (allowed: 1.2 GiB by the control group" in output
    assert code == 0  # the other one does its work


def test_loader_workers_leave_no_folder_behind(tmp_path: Path, temporary: Path) -> None:
    code, _ = end_of(launch(tmp_path, loaders=2))
    assert code == 0
    assert left(temporary) == []


def test_a_killed_launcher_leaves_no_folder_behind(tmp_path: Path, temporary: Path) -> None:
    process = launch(tmp_path, loaders=2, after="time.sleep(60)")
    server = _fork_server_of(process)
    while len(server.children(recursive=True)) < 4:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    server.wait(5)
    assert left(temporary) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_ends_while_it_starts_ends_its_fork_server(
    tmp_path: Path, temporary: Path, number: int
) -> None:
    process = launch(tmp_path)
    server = _fork_server_of(process)
    process.send_signal(number)
    process.communicate(timeout=10)
    end_s = time.monotonic() + 1
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert left(temporary) == []


def _fork_server_of(process: "subprocess.Popen[str]") -> psutil.Process:
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "paceline.engines.local.forkserver" in child.cmdline():
                    return child
        time.sleep(0.002)
    raise AssertionError("no fork server was begun")
