"""Checkpoints on disk: whole or absent, however the writer ends; never a wrong one."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.checkpoints.folder import MANIFEST, POINTER, Checkpoint, CheckpointFolder, _digest_of
from paceline.errors import ConfigError
from paceline.system import files

NAMES = ("a.json", "b.bin", MANIFEST)


def save(checkpoints: CheckpointFolder, value: int) -> Path:
    aside = checkpoints.begin()
    (aside / "a.json").write_text(json.dumps({"value": value}))
    (aside / "b.bin").write_bytes(bytes([value % 251]) * 5000)
    return checkpoints.seal(aside)


def value_of(checkpoint: Checkpoint) -> int:
    value = checkpoint.json("a.json")["value"]
    assert (checkpoint.path / "b.bin").read_bytes() == bytes([value % 251]) * 5000
    assert isinstance(value, int)
    return value


def test_the_newest_checkpoint_is_found_and_the_last_n_are_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    for value in range(5):
        save(checkpoints, value)
        assert value_of(checkpoints.newest()) == value
    assert checkpoints.newest().note == ""
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["3", "4", "5", POINTER]


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        CheckpointFolder(tmp_path).newest()


class Death(BaseException):
    """The writer ends here: nothing after this point happens."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Die at the n-th call that changes the disk."""

    def die_at(number: int) -> None:
        calls = iter(range(number))

        def counted(original: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                if next(calls, None) is None:
                    raise Death
                return original(*arguments, **options)

            return call

        for name in ("fsync", "mkdir", "open", "replace", "unlink"):
            monkeypatch.setattr(os, name, counted(getattr(os, name)))
        monkeypatch.setattr(files.shutil, "rmtree", counted(files.shutil.rmtree))

    return die_at


@pytest.mark.parametrize("number", range(40))
def test_a_whole_checkpoint_is_found_after_a_death_at_any_call(
    tmp_path: Path, number: int, dying: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    for value in (1, 2):
        save(checkpoints, value)
    dying(number)
    try:
        save(checkpoints, 3)
        has_died = False
    except Death:
        has_died = True
    monkeypatch.undo()
    assert value_of(checkpoints.newest()) in ((2, 3) if has_died else (3,))
    assert checkpoints.newest().note == ""
    save(checkpoints, 4)
    assert value_of(checkpoints.newest()) == 4


@pytest.mark.parametrize("number", range(30))
def test_another_writer_completes_an_interrupted_checkpoint(
    tmp_path: Path, number: int, dying: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest may exist already, and is not one of the checkpoint's files."""
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    aside = checkpoints.begin()
    (aside / "a.json").write_text(json.dumps({"value": 3}))
    (aside / "b.bin").write_bytes(bytes([3]) * 5000)
    dying(number)
    with contextlib.suppress(Death):
        checkpoints.seal(aside)
    monkeypatch.undo()
    if aside.exists():
        checkpoints.seal(aside)
    assert value_of(checkpoints.newest()) == 3


def _flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _swap(data: bytes, rng: random.Random) -> bytes:
    half = len(data) // 2
    return data[half:] + data[:half] if data[half:] + data[:half] != data else data + b"\0"


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped": _flip,
    "cut": lambda data, rng: data[: rng.randrange(len(data))],
    "swapped": _swap,
    "enlarged": lambda data, rng: data + rng.randbytes(rng.randint(1, 99)),
    "emptied": lambda data, rng: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(
    tmp_path: Path, damage: str, name: str, seed: int
) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    save(checkpoints, 1)
    newest = save(checkpoints, 2)
    before = (newest / name).read_bytes()
    (newest / name).write_bytes(DAMAGES[damage](before, random.Random(seed)))
    if (newest / name).read_bytes() == before:
        return
    result = checkpoints.newest()
    assert value_of(result) == 1
    assert str(newest / name) in result.note
    assert "checkpoint 1, the one before, is used instead" in result.note
    assert "\n" not in result.note


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pointer_hides_no_checkpoint(tmp_path: Path, damage: str) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    pointer = tmp_path / POINTER
    pointer.write_bytes(DAMAGES[damage](pointer.read_bytes(), random.Random(1)))
    assert value_of(checkpoints.newest()) in (1, 2)


def test_all_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for value in (1, 2):
        (save(checkpoints, value) / "b.bin").unlink()
    with pytest.raises(ConfigError, match=r"2/b\.bin: No such file.*; .*1/b\.bin: No such file"):
        checkpoints.newest()


@pytest.mark.parametrize("name", ["../latest", "a\0", "\ud800"], ids=ascii)
def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path: Path, name: str) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    path = save(checkpoints, 1) / MANIFEST
    body = json.loads(path.read_text())
    body["files"][name] = body["files"]["a.json"]
    del body["sha256"]
    path.write_text(json.dumps({**body, "sha256": _digest_of(body)}))
    with pytest.raises(ConfigError, match=f"its entry for {re.escape(repr(name))} is"):
        checkpoints.newest()


def test_resuming_from_an_older_checkpoint_removes_later_ones(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for value in (1, 2):
        save(checkpoints, value)
    checkpoints.begin()
    checkpoints.rewind(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", POINTER]
    assert value_of(checkpoints.newest()) == 1
    save(checkpoints, 7)
    assert value_of(checkpoints.newest()) == 7


SAVES_FOR_EVER = """
import sys
from pathlib import Path
from paceline.checkpoints.folder import CheckpointFolder
checkpoints, value = CheckpointFolder(Path(sys.argv[1])), 0
while True:
    value += 1
    aside = checkpoints.begin()
    (aside / "a.json").write_text('{"value": %d}' % value)
    (aside / "b.bin").write_bytes(bytes([value % 251]) * 5000)
    checkpoints.seal(aside)
    print(value, flush=True)
"""


@pytest.fixture
def saver(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def test_a_killed_writer_leaves_at_least_what_it_reported(
    tmp_path: Path, saver: "subprocess.Popen[str]"
) -> None:
    assert saver.stdout is not None
    texts = [int(saver.stdout.readline()) for _ in range(10)]
    saver.send_signal(signal.SIGKILL)
    texts += [int(line) for line in saver.stdout]
    assert value_of(CheckpointFolder(tmp_path).newest()) in (texts[-1], texts[-1] + 1)


def test_a_planted_name_hides_no_later_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".new-999999999").mkdir()
    checkpoints = CheckpointFolder(tmp_path)
    assert checkpoints.begin().name == ".new-1"
    assert checkpoints.begin().name == ".new-2"
    (tmp_path / "999999999").mkdir()
    with pytest.raises(OSError, match="999999999 has the last number"):
        checkpoints.begin()
