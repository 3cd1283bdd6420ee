"""``paceline doctor``: exit codes and formats."""

import json
from pathlib import Path

import pytest

from paceline.cli.app import run
from paceline.doctor.examples import STEP, looped


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(looped([*STEP, "torch.cuda.synchronize()"]))
    return path


def test_only_a_bug_is_a_failure_unless_all_is(script: Path) -> None:
    assert run(["doctor", str(script), "--static"]) == 0
    assert run(["doctor", str(script), "--static", "--strict"]) == 1
    script.write_text(looped(STEP[:4]))
    assert run(["doctor", str(script), "--static"]) == 1


def test_one_json_object(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(script), "--static", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (one,) = [one for one in said["findings"] if "sync" in one["rule"]]
    assert (one["rule"], one["severity"]) == ("synchronized-each-turn", "cost")
    assert one["gain"] is None
    assert said["measured"] is False


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "doctor wants a script"),
        (["train.py"], "--static"),
        (["train.py", "--static"], "there is no script"),
        ([".", "--static"], "is a folder"),
        (["x.py", "--static", "--json", "--sarif"], "two formats"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    asked: list[str], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", *asked]) == 2
    assert said in capsys.readouterr().err


def test_the_rules_are_listed_and_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--rules"]) == 0
    assert "clip-before-unscale" in capsys.readouterr().out
    assert run(["doctor", "--test-rules"]) == 0
    assert "examples of" in capsys.readouterr().out
