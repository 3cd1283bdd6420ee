"""Output that cannot be written ends no run and damages none: its end is in a checkpoint."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from meanwhile import meanwhile, stop
from paceline.checkpoints.folder import CheckpointFolder
from paceline.report.summary import summarize

Say = Callable[[str], tuple[int, str, str]]
SCRIPT = """
import os, sys, time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(int(sys.argv[1])):
    for inputs, targets in loader:
        with pace.step():
            time.sleep(0.005)
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
    pace.print("epoch", epoch, "is over")
    if epoch == 2:
        open(f"began-{pace.worker}", "w").close()
    while epoch == 2 and not os.path.exists("go"):
        time.sleep(0.01)
"""
UPDATES = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "temporary").mkdir()
    return tmp_path


def command(*flags: str, epochs: int = 6) -> list[str]:
    words = ["-m", "paceline", "launch", "--workers", "2", "--device", "cpu", "--run-dir", "run"]
    return [sys.executable, *words, *flags, "train.py", str(epochs)]


@contextlib.contextmanager
def begun(
    folder: Path, *flags: str, epochs: int = 6, **options: object
) -> Iterator[subprocess.Popen[str]]:
    """A run that waits after its third epoch until there is a file ``go``."""
    environment = {**os.environ, "TMPDIR": str(folder / "temporary")}
    process: subprocess.Popen[str] = subprocess.Popen(
        command(*flags, epochs=epochs), cwd=folder, env=environment, text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},  # type: ignore[call-overload]
    )  # fmt: skip
    try:
        end_s = time.monotonic() + 60
        while not all((folder / f"began-{worker}").exists() for worker in (0, 1)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end_s
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


def go_on(folder: Path, process: subprocess.Popen[str]) -> tuple[str, str]:
    (folder / "go").touch()
    out, errors = process.communicate(timeout=60)
    assert "Traceback" not in (out or "") + (errors or "")
    return out or "", errors or ""


def version_of(run: Path) -> int:
    """The version of the newest checkpoint."""
    version = CheckpointFolder(run / "checkpoints").newest().json("run.json")["version"]
    assert isinstance(version, int)
    return version


def test_training_continues_when_the_outputs_reader_is_gone(folder: Path) -> None:
    """``paceline launch ... | head``, which ends while the run goes on."""
    with begun(folder) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, errors = go_on(folder, process)
    assert process.returncode == 0
    assert "standard output cannot be written (Broken pipe): the run goes on" in errors
    assert version_of(folder / "run") == 6 * UPDATES
    notes = (folder / "run" / "trace.jsonl").read_text()
    assert "the run's output cannot be printed (Broken pipe): the run goes on" in notes


@pytest.mark.parametrize("closed", ["out", "errors", "both", "input"])
def test_closed_streams_do_not_disturb_a_run(folder: Path, closed: str) -> None:
    """``>&-``: the next file that is opened would get the number of standard output."""
    (folder / "go").touch()
    close = {"out": ">&-", "errors": "2>&-", "both": ">&- 2>&-", "input": "<&-"}[closed]
    shell = subprocess.run(
        ["sh", "-c", f'"$@" {close}', "sh", *command()],
        cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shell.returncode == 0, shell.stderr
    assert "Traceback" not in shell.stderr
    assert version_of(folder / "run") == 6 * UPDATES
    assert summarize(folder / "run").updates == 6 * UPDATES


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_output_device_does_not_end_training(folder: Path) -> None:
    (folder / "go").touch()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(), cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "No space left on device" in done.stderr
        assert version_of(folder / "run") == 6 * UPDATES
        report = [sys.executable, "-m", "paceline", "report", "run"]
        shown = subprocess.run(report, cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True)
    assert shown.returncode == 1
    assert shown.stderr == "error: No space left on device\n"


def test_a_closed_terminal_ends_the_run_with_a_checkpoint(folder: Path) -> None:
    """HUP, and then output has no reader."""
    import pty

    ours, theirs = pty.openpty()
    alone = {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGHUP, 0)}
    with begun(folder, epochs=400, stdout=theirs, stderr=theirs, **alone) as process:
        os.close(theirs)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        go_on(folder, process)
    assert process.returncode == 128 + signal.SIGHUP
    assert version_of(folder / "run") == summarize(folder / "run").updates < 400 * UPDATES
    assert summarize(folder / "run").ended == "interrupted: its terminal is gone"


def test_a_run_under_nohup_survives_hup(folder: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with begun(folder, preexec_fn=ignore) as process:
        process.send_signal(signal.SIGHUP)
        go_on(folder, process)
    assert process.returncode == 0
    assert version_of(folder / "run") == 6 * UPDATES


# -- its folder ------------------------------------------------------------------------------------


def _take_away(run: Path) -> None:
    """Remove the folder of a run that still writes into it, until it makes it no more."""
    while run.exists():
        with contextlib.suppress(OSError):
            shutil.rmtree(run)


def launched(say: Say, *flags: str, epochs: int = 6) -> tuple[int, str]:
    """The same run in this process: its exit code and errors."""
    words = " ".join(flags)
    code, out, errors = say(f"launch --workers 2 --device cpu {words} train.py {epochs}")
    assert "Traceback" not in out + errors
    return code, errors


@contextlib.contextmanager
def halfway(folder: Path, do: Callable[[], object]) -> Iterator[None]:
    """Act when both workers have done their third epoch; then they continue."""

    def act() -> None:
        do()
        (folder / "go").touch()

    with meanwhile(act, folder / "began-0", folder / "began-1"):
        yield


def test_a_deleted_run_folder_exists_again_at_the_end(say: Say, folder: Path) -> None:
    """With the whole trace, from its first line, and the model."""
    with halfway(folder, lambda: _take_away(folder / "run")):
        code, _ = launched(say, "--run-dir", "run", "--checkpoint-every", "'1 epoch'")
    assert code == 0
    assert version_of(folder / "run") == 6 * UPDATES
    assert summarize(folder / "run").updates == 6 * UPDATES


@pytest.mark.parametrize("path", ["store", "peers"])
def test_a_deleted_run_folder_exists_again_at_the_next_checkpoint(
    say: Say, folder: Path, path: str
) -> None:
    """Inside an epoch, where no worker waits while it is written."""
    (folder / "train.py").write_text(
        SCRIPT.replace("randn(48", "randn(2400").replace("epoch == 2", "epoch == 0")
    )

    def act() -> None:
        _take_away(folder / "run")
        (folder / "go").touch()
        end_s = time.monotonic() + 20
        while not (folder / "run" / "checkpoints" / "latest").exists():
            assert time.monotonic() < end_s
            time.sleep(0.01)
        stop()

    with meanwhile(act, folder / "began-0", folder / "began-1"):
        flags = ("--run-dir", "run", "--checkpoint-every", "'50 updates'", "--path", path)
        code, errors = launched(say, *flags, epochs=400)
    assert (code, errors) == (143, "interrupted\n")
    assert version_of(folder / "run") == summarize(folder / "run").updates


def test_an_end_saved_outside_an_unwritable_folder_can_be_resumed(
    say: Say, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has become a file, into which not even root can write."""

    def act() -> None:
        shutil.rmtree(folder / "run")
        (folder / "run").write_text("mine\n")

    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    with halfway(folder, act):
        code, errors = launched(say, "--run-dir", "run")
    assert code == 1
    results = re.search(r"it is in (\S+) instead; to continue from it: --resume", errors)
    assert results is not None, errors
    assert (folder / "run").read_text() == "mine\n"
    assert version_of(Path(results[1])) == 6 * UPDATES
    code, errors = launched(say, "--resume", results[1], epochs=8)
    assert code == 0, errors
    assert summarize(Path(results[1])).updates == 8 * UPDATES


def test_the_end_is_saved_elsewhere_when_the_working_folder_is_gone(folder: Path) -> None:
    """A run's folder is relative to it."""
    (folder / "work").mkdir()
    shutil.copy(folder / "train.py", folder / "work")
    with begun(folder / "work", "--path", "store") as process:
        (folder / "work").rename(folder / "moved")
        (folder / "moved" / "go").touch()
        shutil.rmtree(folder / "moved" / "run")
        shutil.rmtree(folder / "moved", ignore_errors=True)
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert re.search(r"it is in (\S+) instead; to continue from it: --resume", errors), errors


def test_a_temporarily_full_disk_loses_nothing(folder: Path) -> None:
    """Also where a checkpoint fails a moment before the end."""
    with begun(folder, "--checkpoint-every", "1 epoch", epochs=40) as process:
        launcher = psutil.Process(process.pid)
        launcher.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
        (folder / "go").touch()
        time.sleep(0.2)
        launcher.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        out, _ = go_on(folder, process)
    assert process.returncode == 0
    assert "cannot be written (File too large): the run goes on; what is new waits" in out
    assert version_of(folder / "run") == 40 * UPDATES
    assert summarize(folder / "run").updates == 40 * UPDATES


def test_an_end_that_could_not_be_saved_is_an_error(folder: Path) -> None:
    """Neither in the run's folder nor among temporary files: reported, with what there is."""
    with begun(folder, "--checkpoint-every", "1 epoch") as process:
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
        _, errors = go_on(folder, process)
    assert process.returncode == 1
    assert re.search(r"error: the end of the run could not be written to run: .*too large", errors)
    assert "it is in no checkpoint; run/checkpoints has an older one" in errors
    assert list((folder / "run" / "checkpoints").glob(".new-*")) == []
    assert list((folder / "temporary").glob("run-*")) == []
    assert version_of(folder / "run") < 6 * UPDATES
