"""Advice from a new profile."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import RunSettings
from paceline.errors import ConfigError
from paceline.predict import advice
from paceline.predict.advice import Question
from paceline.report.summary import Summary, summarize
from paceline.trace import Trace
from paceline.workloads import load_task


def test_profiles_of_the_same_second_use_separate_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def launched(program: object, settings: RunSettings, *_: object) -> Summary:
        assert settings.run_dir is not None
        trace = Trace(Path(settings.run_dir) / "trace.jsonl")
        trace.header(task="quadratic", workers=settings.workers)
        trace.end(1.0, "finished")
        trace.close()
        return summarize(Path(settings.run_dir))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(advice, "launch_run", launched)
    clock: Any = SimpleNamespace(strftime=lambda form: "20260101-000000")
    monkeypatch.setattr("paceline.run_dir.time", clock)
    question = Question(task="quadratic", workers=2)
    task = load_task("quadratic", 2, None)
    folders = [advice._measure(question, task, 4, lambda text: None) for _ in range(2)]
    assert len(set(folders)) == 2


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("launch_run", RuntimeError("no process could be started")),
        ("of_flags", ConfigError("a flag is wrong")),
    ],
)
def test_failed_profile_leaves_no_empty_folder(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(advice, name, fail)
    task = load_task("quadratic", 2, None)
    with pytest.raises(type(error), match=str(error)):
        advice._measure(Question(task="quadratic", workers=2), task, 4, lambda text: None)
    assert not list(tmp_path.glob("runs/*"))
