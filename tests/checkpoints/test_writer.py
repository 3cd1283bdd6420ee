"""The writer beside the run is stopped or killed: the run ends, with checkpoints that are true."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
    """From now on each writer gets this signal as soon as it lives; their process numbers."""
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
    """A checkpoint of a model without parameters, as a member has begun it."""
    checkpoints = CheckpointFolder(folder)
    aside = checkpoints.begin()
    empty = {"at": 0, "parameters": [], "buffers": [], "state": []}
    (aside / LAYOUT).write_text(json.dumps(empty))
    return {"aside": str(aside), "folder": str(folder), "keep": 9, "files": files, "sync": []}


@ENDS
def test_what_it_still_had_is_written_here(
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


def test_what_it_renamed_and_did_not_point_to_is_the_newest(
    tmp_path: Path, struck: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    struck(signal.SIGSTOP)
    memory = SharedMemory.create(64)
    writer.write(request(tmp_path, {"run.json": {"version": 1}}), memory.buffer)
    asked = request(tmp_path, {"run.json": {"version": 2}})
    here = WriteQueue(memory)
    here.hand_in(asked, is_last=False)

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "_point", cut_off)
        with pytest.raises(KeyboardInterrupt):
            writer.write(asked, memory.buffer)
    here.finish()
    assert [Path(one["sealed"]).name for one in here.answers()] == ["2"]
    assert CheckpointFolder(tmp_path).newest().json("run.json") == {"version": 2}
    here.close()


def test_what_somebody_has_taken_away_was_not_written(
    tmp_path: Path, struck: Callable[[int], list[int]]
) -> None:
    struck(signal.SIGSTOP)
    here = WriteQueue(SharedMemory.create(64))
    asked = request(tmp_path, {})
    here.hand_in(asked, is_last=False)
    shutil.rmtree(asked["aside"])
    here.finish()
    assert here.answers() == [{"failed": "No such file or directory"}]
    here.close()


@ENDS
def test_while_the_run_goes_its_checkpoint_fails_in_words_and_the_next_has_another(
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


def test_a_run_whose_writer_is_stopped_ends_with_checkpoints_that_are_true(
    tmp_path: Path, struck: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is of its own version, although the next one was due before it was written."""
    assert not struck(signal.SIGSTOP)
    monkeypatch.setattr(writer, "_STOPPED_S", 1.0)  # longer than the run: none is given up in it
    epochs = 3
    task = replace(TASK, epochs=epochs)
    run = train(task, tmp_path, workers=2, checkpoint_every="1 epoch", keep=9)
    assert run.num_epochs_ended() == epochs
    checkpoints = CheckpointFolder(run.folder / "checkpoints")
    found = [checkpoints.check(number) for number in range(1, epochs + 1)]
    for epoch, one in enumerate(found, start=1):
        assert one.json("run.json")["epoch"] == epoch
        alone = plain_loop(replace(TASK, epochs=epoch))
        saved = load_file(one.path / MODEL)  # without the second name of what is tied
        assert differ(saved, {name: alone[name] for name in saved}) < 1e-6


@pytest.mark.timeout(20)
def test_one_that_is_stopped_when_it_has_nothing_to_do_holds_up_no_end(
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


def test_it_ends_without_a_word_when_nobody_reads_what_it_wrote(tmp_path: Path) -> None:
    """A launcher that is killed closes its end a moment before its writer is killed, too."""
    memory = SharedMemory.create(64)
    unread, said = os.pipe()
    os.close(unread)
    ended = subprocess.run(
        [sys.executable, "-m", "paceline.checkpoints.writer", str(memory.fd)],
        input=json.dumps(request(tmp_path, {})).encode() + b"\n",
        stdout=said, stderr=subprocess.PIPE, pass_fds=[memory.fd], timeout=60, check=False,
    )  # fmt: skip
    os.close(said)
    assert ended.stderr == b""
    assert not CheckpointFolder(tmp_path).is_empty


@pytest.mark.timeout(20)
def test_a_long_request_waits_for_nobody_who_is_stopped(
    tmp_path: Path, struck: Callable[[int], list[int]]
) -> None:
    """Longer than what a pipe takes; and nothing of it stays behind."""
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
