"""Settings, checkpoints and traces with impossible values: one sentence, at once."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoints.folder import MANIFEST, _digest_of
from paceline.checkpoints.resumption import adopt
from paceline.config import RunSettings, resolve
from paceline.errors import ConfigError
from paceline.launch import launcher
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.report.summary import summarize
from resealing import reseal
from runs import Run, train
from tiny import TASK

Say = Callable[[str], tuple[int, str, str]]


def seal(checkpoint: Path) -> None:
    """Write correct checksums, as an attacker would."""
    body = json.loads((checkpoint / MANIFEST).read_text())
    body.pop("sha256")
    for name in body["files"]:
        path = checkpoint / name
        body["files"][name] = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
        }
    (checkpoint / MANIFEST).write_text(json.dumps({**body, "sha256": _digest_of(body)}))


def go_on(folder: Path, notes: list[str] | None = None) -> Any:
    flags = {"resume": str(folder), "updates": 9, "device": "cpu"}
    settings = adopt(resolve(flags, env={}, is_call=True))
    return launcher.launch_run(TaskProgram(task=TASK), settings, Heard(notes))


class Heard(QuietObserver):
    def __init__(self, notes: list[str] | None) -> None:
        super().__init__()
        self._notes = notes

    def note(self, text: str) -> None:
        if self._notes is not None:
            self._notes.append(text)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return train(TASK, tmp_path, engine="inline", updates=3)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("workers", 1_000_000, "1,000,000 workers are more than one machine can run"),
        ("workers", 10**30, "workers must fit into 64 bits, got a number of 100"),
        ("loader_workers", 10**6, "loader_workers must be <= 1024, got 1000000"),
        ("threads", 10**6, "threads must be <= 1024, got 1000000"),
        ("protocol", [[[["x"] * 1000] * 1000]], "protocol must be a text in UTF-8, got .{1,99}$"),
    ],
)
def test_settings_of_a_checkpoint_must_be_in_range(
    run: Run, name: str, value: object, words: str
) -> None:
    path = run.folder / "checkpoints" / "1" / "run.json"
    saved = json.loads(path.read_text())
    saved["settings"] |= {name: value, "engine": "local"}
    path.write_text(json.dumps(saved))
    seal(path.parent)
    with pytest.raises(ConfigError, match=words.removesuffix("$")):
        go_on(run.folder)


def test_deeply_nested_json_is_reported_as_damage(run: Run) -> None:
    path = run.folder / "checkpoints" / "1" / "run.json"
    path.write_text("[" * 100_000)
    seal(path.parent)
    with pytest.raises(ConfigError, match="the checkpoint is damaged"):
        go_on(run.folder)


def test_a_report_of_very_many_workers_is_short(run: Run, say: Say) -> None:
    path = run.folder / "trace.jsonl"
    path.write_text(reseal(path.read_text().replace('"workers":1,', '"workers":1000000,', 1)))
    code, out, _ = say(f"report {run.folder}")
    assert code == 0
    assert len(out) < 10_000
    assert summarize(run.folder).chapter_line().endswith("['cpu:0', '999,998 more', 'cpu:999999']")


ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{now}: &{now} [{','.join(['*' + before] * 9)}]\n"
    for before, now in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ALIASES, "uses a YAML alias"),
        (ALIASES.replace("a:", "slow:"), "uses a YAML alias"),
        ("workers: " + "9" * 5000, "workers.yaml"),
        ("workers: .inf", "workers must be a whole number"),
        ("lr: .inf", "lr must be finite, got inf"),
        ("seconds: .nan", "seconds must be > 0, got nan"),
        (
            "updates: 0x" + "f" * 5000,
            "updates must fit into 64 bits, got a number of 20000",
        ),
        ("updates: " + "9" * 40, "updates must fit into 64 bits"),
        ("[" * 100_000, "workers.yaml is not valid YAML"),
        ("# " + "x" * 2**21, "it has more than 1,048,576 bytes"),
    ],
    ids=lambda text: text[:20],
)
def test_a_malicious_settings_file_is_refused_in_a_short_message(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        resolve({}, path, env={})
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\udcff"])
@pytest.mark.parametrize("setting", ["name", "run_dir"])
def test_an_impossible_folder_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"File name too long|must be a text in UTF-8"):
        launcher.launch_run(
            TaskProgram(task=TASK),
            RunSettings(engine="inline", updates=1, **{setting: name}),  # type: ignore[arg-type]
            QuietObserver(),
        )
    assert not any(tmp_path.glob("runs/*"))


# -- of another run --------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path: Path) -> Run:
    return train(TASK, tmp_path / "other", engine="inline", updates=5)


def test_a_checkpoint_of_another_run_is_refused_by_name(run: Run, other: Run) -> None:
    shutil.rmtree(run.folder / "checkpoints")
    shutil.copytree(other.folder / "checkpoints", run.folder / "checkpoints")
    with pytest.raises(ConfigError, match=r"checkpoints/1 is of another run than .*trace.jsonl"):
        go_on(run.folder)


def test_the_runs_own_previous_checkpoint_is_used_with_a_note(run: Run, other: Run) -> None:
    checkpoints = run.folder / "checkpoints"
    shutil.copytree(other.folder / "checkpoints" / "1", checkpoints / "2")
    (checkpoints / "latest").write_text('{"checkpoint": 2}')
    notes: list[str] = []
    summary = go_on(run.folder, notes)
    assert summary.updates == 9
    (note,) = [note for note in notes if "is of another run" in note]
    assert note.endswith("checkpoint 1, the one before, is used instead")


def test_a_trace_of_another_run_is_refused_by_name(run: Run, other: Run) -> None:
    shutil.copy(other.folder / "trace.jsonl", run.folder / "trace.jsonl")
    with pytest.raises(ConfigError, match="is of another run than"):
        go_on(run.folder)


def test_a_run_without_a_token_can_be_resumed(run: Run) -> None:
    path = run.folder / "checkpoints" / "1" / "run.json"
    saved = json.loads(path.read_text())
    trace = run.folder / "trace.jsonl"
    text = trace.read_text()
    old = reseal(text.replace(f',"token":"{saved.pop("token")}"', "", 1))
    end = len(old) - len(reseal(text)) + saved["trace_bytes"]
    trace.write_text(old)
    saved["trace_bytes"] = old[: end + 1].rfind("\n") + 1
    path.write_text(json.dumps(saved))
    seal(path.parent)
    assert go_on(run.folder).updates == 9
    assert go_on(run.folder) is not None
