"""The writer beside the run is stopped or killed: the run ends, with correct checkpoints."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from paceline.checkpoints import writer
from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.writer import LAYOUT, MODEL, WriteQueue
from paceline.store.memory import SharedMemory
from reference import differ, plain_loop
from runs import train
from tiny import TASK

ENDS = pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stop", "kill"])


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Send each new writer this signal; the writers' process ids."""
    start = WriteQueue._start
    monkeypatch.setattr(writer, "_STOPPED_S", 0.3)

    def strike(number: int) -> list[int]:
        pids: list[int] = []

        def started(here: WriteQueue) -> "subprocess.Popen[bytes]":
            process = start(here)
            process.send_signal(number)
            pids.append(process.pid)
            return process

        monkeypatch.setattr(WriteQueue, "_start", started)
        return pids

    return strike


def request(folder: Path, files: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of a model without parameters, as a member begins it."""
    checkpoints = CheckpointFolder(folder)
    aside = checkpoints.begin()
    empty = {"at": 0, "parameters": [], "buffers": [], "state": []}
    (aside / LAYOUT).write_text(json.dumps(empty))
    return {"aside": str(aside), "folder": str(folder), "keep": 9, "files": files, "sync": []}


@ENDS
def test_pending_requests_of_a_dead_writer_are_written_here(
    tmp_path: Path, struck: Callable[[int], list[int]], number: int
) -> None:
    pids = struck(signal.SIGSTOP)
    here = WriteQueue(SharedMemory.create(64))
    for version in (1, 2):
        here.hand_in(request(tmp_path, {"run.json": {"version": version}}), is_last=False)
    os.kill(pids[0], number)
    here.finish()
    assert not here.is_busy
    assert all("failed" not in answer for answer in here.answers())
    assert CheckpointFolder(tmp_path).newest().json("run.json") == {"version": 2}
    here.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("is_sent", [False, True])
def test_request_cut_off_by_a_second_signal_is_written_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    here, start = WriteQueue(SharedMemory.create(64)), WriteQueue._start

    def started(queue: WriteQueue) -> "subprocess.Popen[bytes]":
        start(queue)
        raise KeyboardInterrupt

    def half_read(descriptor: int, size: int) -> bytes:
        monkeypatch.undo()
        os.read(descriptor, size)
        raise KeyboardInterrupt

    def hand_in_and_wait() -> None:
        with closing(here):
            here.hand_in(request(tmp_path, {"run.json": {"version": 1}}), is_last=False)
            here.finish()

    if is_sent:
        monkeypatch.setattr(os, "read", half_read)
    else:
        monkeypatch.setattr(WriteQueue, "_start", started)
    with pytest.raises(KeyboardInterrupt):
        hand_in_and_wait()
    [answer] = here.answers()
    assert "sealed" in answer
    assert CheckpointFolder(tmp_path).newest().json("run.json") == {"version": 1}


@pytest.mark.timeout(20)
def test_answers_after_a_second_signal_wait_for_no_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, end = WriteQueue(SharedMemory.create(64)), WriteQueue._end_writer
    monkeypatch.setattr(WriteQueue, "_send", lambda *_: pytest.fail("it is interrupted"))
    with pytest.raises(pytest.fail.Exception):
        here.hand_in(request(tmp_path, {}), is_last=False)

    def interrupted(queue: WriteQueue) -> None:
        monkeypatch.setattr(WriteQueue, "_end_writer", end)
        raise KeyboardInterrupt

    monkeypatch.setattr(WriteQueue, "_end_writer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        here.answers()
    [answer] = here.answers()
    assert "sealed" in answer
    here.close()


def test_a_renamed_checkpoint_without_a_pointer_is_the_newest(
    tmp_path: Path, struck: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    struck(signal.SIGSTOP)
    memory = SharedMemory.create(64)
    writer.write(request(tmp_path, {"run.json": {"version": 1}}), memory.buffer)
    pending = request(tmp_path, {"run.json": {"version": 2}})
    here = WriteQueue(memory)
    here.hand_in(pending, is_last=False)

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "_point", cut_off)
        with pytest.raises(KeyboardInterrupt):
            writer.write(pending, memory.buffer)
    here.finish()
    assert [Path(answer["sealed"]).name for answer in here.answers()] == ["2"]
    assert CheckpointFolder(tmp_path).newest().json("run.json") == {"version": 2}
    here.close()


def test_a_removed_checkpoint_is_reported_as_not_written(
    tmp_path: Path, struck: Callable[[int], list[int]]
) -> None:
    struck(signal.SIGSTOP)
    here = WriteQueue(SharedMemory.create(64))
    pending = request(tmp_path, {})
    here.hand_in(pending, is_last=False)
    shutil.rmtree(pending["aside"])
    here.finish()
    assert here.answers() == [{"failed": "No such file or directory"}]
    here.close()


@ENDS
def test_a_dead_writers_checkpoint_is_reported_and_a_new_writer_starts(
    tmp_path: Path, struck: Callable[[int], list[int]], number: int
) -> None:
    pids = struck(number)
    here = WriteQueue(SharedMemory.create(64))
    here.hand_in(request(tmp_path, {}), is_last=False)
    end_s = time.monotonic() + 20
    answers: list[dict[str, Any]] = []
    while not answers and time.monotonic() < end_s:
        answers = here.answers()
    (answer,) = answers
    assert answer["failed"].startswith("its writer ")
    here.hand_in(request(tmp_path, {}), is_last=False)
    assert len(set(pids)) == 2
    here.close()


def test_a_run_with_a_stopped_writer_ends_with_correct_checkpoints(
    tmp_path: Path, struck: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is of its own version, although the next was due before it was written."""
    assert not struck(signal.SIGSTOP)
    monkeypatch.setattr(writer, "_STOPPED_S", 1.0)  # longer than the run: none is given up in it
    epochs = 3
    task = replace(TASK, epochs=epochs)
    run = train(task, tmp_path, workers=2, checkpoint_every="1 epoch", keep=9)
    assert run.num_epochs_ended() == epochs
    checkpoints = CheckpointFolder(run.folder / "checkpoints")
    results = [checkpoints.check(number) for number in range(1, epochs + 1)]
    for epoch, result in enumerate(results, start=1):
        assert result.json("run.json")["epoch"] == epoch
        alone = plain_loop(replace(TASK, epochs=epoch))
        saved = load_file(result.path / MODEL)  # without the second name of a tied weight
        assert differ(saved, {name: alone[name] for name in saved}) < 1e-6


@pytest.mark.timeout(20)
def test_an_idle_stopped_writer_does_not_delay_the_end(
    tmp_path: Path, struck: Callable[[int], list[int]]
) -> None:
    pids = struck(signal.SIGCONT)
    here = WriteQueue(SharedMemory.create(64))
    here.hand_in(request(tmp_path, {"run.json": {"version": 1}}), is_last=False)
    here.finish()
    os.kill(pids[0], signal.SIGSTOP)
    here.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_writer_without_a_reader_ends_silently(tmp_path: Path) -> None:
    """A killed launcher closes its end a moment before its writer is killed."""
    memory = SharedMemory.create(64)
    unread, output = os.pipe()
    os.close(unread)
    ended = subprocess.run(
        [sys.executable, "-m", "paceline.checkpoints.writer", str(memory.fd), str(output)],
        input=json.dumps(request(tmp_path, {})).encode() + b"\n",
        stderr=subprocess.PIPE, pass_fds=[memory.fd, output], timeout=60, check=False,
    )  # fmt: skip
    os.close(output)
    assert ended.stderr == b""
    assert not CheckpointFolder(tmp_path).is_empty


def test_folder_of_the_run_and_foreign_output_do_not_disturb_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module there that is named as one of Python's own, and a library that prints."""
    (tmp_path / "secrets.py").write_text("raise OSError('not this one')")
    site, checkpoints = tmp_path / "site", tmp_path / "checkpoints"
    site.mkdir()
    checkpoints.mkdir()
    (site / "sitecustomize.py").write_text("print('hello')")
    monkeypatch.chdir(tmp_path)
    search_path = filter(None, [str(site), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search_path))
    with closing(WriteQueue(SharedMemory.create(64))) as here:
        here.hand_in(request(checkpoints, {"run.json": {"version": 1}}), is_last=False)
        here.finish()
        assert here._process is not None, "the request was not written by the writer"
        assert ["sealed" in answer for answer in here.answers()] == [True]


@pytest.mark.timeout(20)
def test_a_long_request_does_not_wait_for_a_stopped_writer(
    tmp_path: Path, struck: Callable[[int], list[int]]
) -> None:
    """It is longer than a pipe holds, and nothing of it remains."""
    struck(signal.SIGSTOP)
    here = WriteQueue(SharedMemory.create(64))
    here.hand_in(request(tmp_path, {"run.json": {"text": "a" * 300_000}}), is_last=False)
    end_s = time.monotonic() + 10
    while not (answers := here.answers()):
        assert time.monotonic() < end_s
    assert answers == [{"failed": "its writer was stopped (SIGSTOP)"}]
    assert list(tmp_path.iterdir()) == []
    here.close()


def test_a_long_request_is_read_to_its_end(tmp_path: Path) -> None:
    here = WriteQueue(SharedMemory.create(64))
    here.hand_in(request(tmp_path, {"run.json": {"text": "a" * 300_000}}), is_last=False)
    here.finish()
    assert len(CheckpointFolder(tmp_path).newest().json("run.json")["text"]) == 300_000
    here.close()
