"""One run at a time in a folder; one that was cut off early does not block it forever."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from forked import Forked
from paceline.config import RunSettings
from paceline.errors import ConfigError
from paceline.launch.lives import claim
from paceline.run_dir import make_folder
from paceline.system.files import OpenFolder
from paceline.trace import FILE_NAME, Trace

Say = Callable[[str], tuple[int, str, str]]
Ended = Callable[..., tuple[int, str]]
LONG = """
import os, time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(24, 4), torch.ones(24, 1)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(4):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
    while epoch == EPOCH and not os.path.exists("go"):
        open("waits", "w").close()
        time.sleep(0.01)
"""


def command(*flags: str) -> list[str]:
    own = ["--engine", "inline", "--device", "cpu", "--threads", "1"]
    return ["-m", "paceline", "launch", *own, *flags, "train.py"]


@pytest.fixture
def ended(say: Say) -> Ended:
    """A complete run in this process: its exit code and output."""

    def run(*flags: str) -> tuple[int, str]:
        code, out, err = say(" ".join(command(*flags)[2:]))
        assert "Traceback" not in err
        return code, out + err

    return run


def waiting(folder: Path, *flags: str, epoch: int = 0) -> Forked:
    """A run that waits at the end of an epoch until a file ``go`` exists."""
    (folder / "train.py").write_text(LONG.replace("EPOCH", str(epoch)))
    process = Forked(command(*flags), cwd=folder, stdout=PIPE, stderr=PIPE)
    end_s = time.monotonic() + 60
    while not (folder / "waits").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.01)
    (folder / "waits").unlink()
    return process


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


TAKEN = ("another run is at work in", "exists already", "holds a run")


@pytest.mark.parametrize(
    ("place", "folder", "others"),
    [
        (("--run-dir", "out"), "out", [(), ("--resume", "auto")]),
        (("--name", "one"), "runs/one", [(), ("--resume", "auto")]),
    ],
    ids=["dir", "name"],
)
def test_a_second_run_in_a_folder_is_refused_and_changes_nothing(
    tmp_path: Path,
    ended: Ended,
    place: tuple[str, ...],
    folder: str,
    others: list[tuple[str, ...]],
) -> None:
    first = waiting(tmp_path, *place, "--checkpoint-every", "1 epoch", epoch=1)
    before = contents(tmp_path / folder)
    for flags in [*((*place, *more) for more in others), ("--resume", folder)]:
        code, output = ended(*flags)
        assert code == 2
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert any(words in line for words in TAKEN), line
        assert contents(tmp_path / folder) == before
    (tmp_path / "go").touch()
    _, words = first.communicate(timeout=60)
    assert first.returncode == 0, words
    assert not (tmp_path / folder / "lock").exists()


def test_a_killed_run_does_not_lock_its_folder(tmp_path: Path, ended: Ended) -> None:
    first = waiting(tmp_path, "--run-dir", "out", "--checkpoint-every", "1 epoch", epoch=2)
    first.kill()
    first.communicate()
    (tmp_path / "go").touch()
    code, output = ended("--resume", "out")
    assert code == 0, output
    assert "going on with out at version" in output


def test_workers_of_a_killed_launcher_do_not_lock_the_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LONG.replace("EPOCH", "0"))
    flags = ["--workers", "2", "--device", "cpu", "--run-dir", "out", "train.py"]
    run = subprocess.Popen(
        [sys.executable, "-m", "paceline", "launch", *flags], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (tmp_path / "waits").exists():
        time.sleep(0.01)
    lock = os.open(tmp_path / "out" / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run.kill()
    run.wait()
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)


# -- a run that was cut off before its first checkpoint --------------------------------------------


@pytest.mark.parametrize("place", [("--run-dir", "out"), ("--name", "one")], ids=["dir", "name"])
def test_resume_auto_starts_anew_after_a_kill_before_the_first_checkpoint(
    tmp_path: Path, ended: Ended, place: tuple[str, str]
) -> None:
    first = waiting(tmp_path, *place, "--resume", "auto")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    (tmp_path / "go").touch()
    folder = tmp_path / ("out" if place[0] == "--run-dir" else "runs/one")
    assert (folder / "trace.jsonl").exists()
    best = {"best.json", "best.safetensors", "best-7.safetensors"}
    for name in (*best, "best-of-mine.safetensors"):
        (folder / name).touch()
    code, output = ended(*place, "--resume", "auto")
    assert code == 0, output
    (note,) = [line for line in output.splitlines() if "was cut off before its first" in line]
    assert note.endswith("cut-off-1")
    assert (folder / "cut-off-1" / "trace.jsonl").stat().st_size > 0
    assert {path.name for path in (folder / "cut-off-1").glob("best*")} == best
    assert [path.name for path in folder.glob("best*")] == ["best-of-mine.safetensors"]
    assert (folder / "summary.json").exists()


@pytest.mark.parametrize("reason", ["interrupted: terminated", "failed: worker 1 ended"])
def test_an_error_before_the_first_checkpoint_counts_as_cut_off(
    tmp_path: Path, reason: str
) -> None:
    with closing(claim(RunSettings(run_dir=str(tmp_path)), "x", quiet)) as folder:
        trace = Trace(folder.path / FILE_NAME)
        trace.header(workers=1)
        trace.end(1.0, reason)
        trace.close()
    notes: list[str] = []
    claim(RunSettings(run_dir=str(tmp_path), resume="auto"), "x", notes.append).close()
    assert "was cut off before its first checkpoint: it starts from the beginning" in notes[0]


def test_setting_a_run_aside_can_itself_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RunSettings(run_dir=str(tmp_path / "out"), resume="auto")
    (tmp_path / "out").mkdir()
    left = {"trace.jsonl", "best.json", "best.safetensors", "best-7.safetensors", "metrics.csv"}
    for name in left:
        (tmp_path / "out" / name).touch()
    rename = OpenFolder.rename

    def killed(place: OpenFolder, *arguments: Any, **options: Any) -> None:
        if len(list((tmp_path / "out").glob("cut-off-*/*"))) == 2:
            raise KeyboardInterrupt
        rename(place, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(OpenFolder, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            claim(settings, "x", quiet)
    notes: list[str] = []
    claim(settings, "x", notes.append).close()
    assert "was cut off before its first checkpoint: it starts from the beginning" in notes[0]
    assert {path.name for path in (tmp_path / "out").glob("cut-off-*/*")} == left
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"cut-off-1", "cut-off-2"}


def test_a_finished_run_is_not_started_again(tmp_path: Path, ended: Ended) -> None:
    (tmp_path / "go").touch()
    (tmp_path / "train.py").write_text(LONG.replace("EPOCH", "0"))
    never = ("--run-dir", "out", "--checkpoint-every", "never", "--resume", "auto")
    assert ended(*never)[0] == 0
    before = contents(tmp_path / "out")
    code, output = ended(*never)
    assert code == 2
    assert "out already holds a run, which has ended" in output
    assert contents(tmp_path / "out") == before


# -- folders that cannot be one --------------------------------------------------------------------


def quiet(text: str) -> None:
    raise AssertionError(text)


def test_two_runs_that_claim_names_at_once_get_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        closing(claim(RunSettings(), "x", quiet)) as first,
        closing(claim(RunSettings(), "x", quiet)) as second,
    ):
        assert first.path != second.path
        assert (tmp_path / "runs" / "latest").resolve() == second.path.resolve()
        second.discard(())
        assert (tmp_path / "runs" / "latest").resolve() == first.path.resolve()


def test_a_run_that_finds_its_folder_removed_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RunSettings(run_dir=str(tmp_path / "out"))
    first = claim(settings, "x", quiet)
    late = make_folder(settings, "x")
    first.discard(())
    first.close()
    with pytest.raises(FileNotFoundError):
        late.hold()
    late.close()
    with closing(claim(settings, "x", quiet)) as folder:
        assert folder.path.is_dir()


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    notes: list[str] = []
    claim(RunSettings(run_dir=str(tmp_path / "out")), "x", notes.append).close()
    why = "cannot be locked against other runs: Function not implemented"
    assert notes == [f"{tmp_path / 'out'} {why}"]


def test_a_file_in_place_of_the_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/inner"):
        with pytest.raises(ConfigError, match="it is not a folder"):
            claim(RunSettings(run_dir=str(tmp_path / name)), "x", quiet)
