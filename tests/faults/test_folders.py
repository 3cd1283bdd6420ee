"""Unexpected files in a run's folder: nothing is written through them."""

import multiprocessing
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.resumption import adopt
from paceline.checkpoints.state import write_whole
from paceline.config import RunSettings, resolve
from paceline.errors import ConfigError, FileError, LinkError, WorkerError
from paceline.launch import launcher
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.report.summary import summarize
from paceline.system.files import OpenFolder
from runs import Run, train
from tiny import TASK

PLANTED = (
    "logs", "logs/worker-0.log", "metrics.csv", "summary.json", "curve.svg", "checkpoints",
    "checkpoints/latest", "checkpoints/.new-1", "lock", "tensorboard", "model.safetensors",
)  # fmt: skip


class Victim:
    """A file and a folder that no run may touch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.file = folder / "file"
        self.file.write_text("mine\n")
        self.file.chmod(0o640)
        (folder / "within").mkdir()
        self._was = self._look()

    def _look(self) -> list[tuple[object, ...]]:
        every = [self.folder, *sorted(self.folder.rglob("*"))]
        looks = [path.lstat() for path in every]
        return [
            (str(path), look.st_mode, look.st_uid, path.is_file() and path.read_bytes())
            for path, look in zip(every, looks, strict=True)
        ]

    @property
    def is_whole(self) -> bool:
        return self._look() == self._was


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path / "victim")


KINDS: dict[str, Callable[[Path, Victim], None]] = {
    "link to a file": lambda path, victim: path.symlink_to(victim.file),
    "link to a folder": lambda path, victim: path.symlink_to(victim.folder / "within"),
    "link to nothing": lambda path, victim: path.symlink_to(victim.folder / "new"),
    "hard link": lambda path, victim: path.hardlink_to(victim.file),
    "pipe": lambda path, victim: os.mkfifo(path),
    "folder": lambda path, victim: path.mkdir(),
}


def attempt(run: Callable[[], object]) -> str:
    """The error message of ``run``, or an empty text."""
    try:
        run()
    except (ConfigError, LinkError, WorkerError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLANTED)
def test_a_new_run_writes_through_no_planted_file(
    tmp_path: Path, victim: Victim, name: str, kind: str
) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    KINDS[kind](path, victim)
    settings: dict[str, Any] = {"log": "tensorboard" if name == "tensorboard" else "csv"}
    message = attempt(lambda: train(TASK, tmp_path, engine="inline", updates=3, **settings))
    assert victim.is_whole
    assert "\n" not in message


@pytest.mark.parametrize("kind", KINDS)
def test_worker_logs_are_opened_before_workers_start(
    tmp_path: Path, victim: Victim, kind: str
) -> None:
    path = tmp_path / "run" / "logs" / "worker-1.log"
    path.parent.mkdir(parents=True)
    KINDS[kind](path, victim)
    with pytest.raises(FileError, match=r"worker-1\.log: "):
        train(TASK, tmp_path, workers=2, updates=3)
    assert victim.is_whole
    assert path.exists() or path.is_symlink()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("whole")
    return train(TASK, folder, engine="inline", updates=3, log="csv")


OLD = (
    "trace.jsonl", "checkpoints", "checkpoints/latest", "checkpoints/1/run.json",
    "checkpoints/1/model.safetensors", "checkpoints/1/manifest.json",
    "checkpoints/1/worker-0.json",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted({*PLANTED, *OLD}))
def test_a_resumed_run_writes_through_no_planted_file(
    tmp_path: Path, victim: Victim, whole: Run, name: str, kind: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole.folder, folder)
    path = folder / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path, victim)

    def go_on() -> None:
        flags = {"resume": str(folder), "updates": 5, "device": "cpu", "log": "csv"}
        settings = adopt(resolve(flags, env={}, is_call=True))
        launcher.launch_run(TaskProgram(task=TASK), settings, QuietObserver())

    message = attempt(go_on)
    assert victim.is_whole
    assert "\n" not in message
    if name in OLD and not (name.startswith("checkpoints/") and not message):
        assert message


def test_reading_a_run_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.jsonl")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        summarize(tmp_path)


# -- folders ---------------------------------------------------------------------------------------


def test_a_world_writable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(ConfigError, match="everybody may write to it: chmod o-w"):
        train(TASK, tmp_path, engine="inline", updates=1)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_group_writable_folder_is_accepted(tmp_path: Path) -> None:
    """With a umask of 002, common on many systems, every folder is one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o775)
    assert train(TASK, tmp_path, engine="inline", updates=1).summary.updates == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_folder_or_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 1234, 1234)
    with pytest.raises(ConfigError, match="it belongs to user 1234"):
        train(TASK, tmp_path, engine="inline", updates=1)
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "own")
    OpenFolder.open(tmp_path / "link").close()
    os.lchown(tmp_path / "link", 1234, 1234)
    with pytest.raises(ConfigError, match="it is another user's link"):
        OpenFolder.open(tmp_path / "link")


def test_folders_are_accepted_where_files_have_no_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network share that gives all files to one user."""
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert train(TASK, tmp_path, engine="inline", updates=1).summary.updates == 1


def test_a_folder_that_was_replaced_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with closing(OpenFolder.open(tmp_path / "run")) as place:
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        place.write("a", b"1")
        with pytest.raises(FileError, match="another folder than the one that the run began in"):
            OpenFolder.open(tmp_path / "run", place.identity)
        with pytest.raises(FileError, match="another folder"):  # as another machine knows it
            OpenFolder.open(tmp_path / "run", place.identity[1:])
        with closing(OpenFolder.open(tmp_path / "moved", place.identity[1:])) as same:
            assert same.identity == place.identity
        checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints", within=place.identity)
        with pytest.raises(FileError, match="another folder"):
            checkpoints.begin()
    assert (tmp_path / "moved" / "a").read_bytes() == b"1"
    assert list((tmp_path / "run").iterdir()) == []


def test_new_files_are_writable_by_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = train(TASK, tmp_path, engine="inline", updates=1)
    finally:
        os.umask(before)
    every = [run.folder, *run.folder.rglob("*")]
    assert not any(path.stat().st_mode & (stat.S_IWOTH | stat.S_IWGRP) for path in every)
    assert RunSettings().run_dir is None


def replaced(path: Path, data: Iterator[bytes]) -> None:
    with closing(OpenFolder.open(path.parent)) as place:
        place.replace(path.name, data)


@pytest.mark.parametrize("write", [replaced, write_whole])
def test_partial_files_of_the_dead_are_removed_and_those_of_the_living_kept(
    tmp_path: Path, write: Callable[[Path, Iterator[bytes]], None]
) -> None:
    def killed() -> Iterator[bytes]:
        yield b"half"
        os.kill(os.getpid(), signal.SIGKILL)

    (tmp_path / ".mine.0123abcd").touch()
    writer = multiprocessing.get_context("fork").Process(
        target=write, args=(tmp_path / "model", killed())
    )
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".model.*.part"))) == 1
    with closing(OpenFolder.open(tmp_path)) as place:

        def pieces() -> Iterator[bytes]:
            yield b"the whole "
            place.remove_parts()
            yield b"model"

        write(tmp_path / "model", pieces())
        assert place.names() == [".mine.0123abcd", "model"]
    assert (tmp_path / "model").read_bytes() == b"the whole model"
