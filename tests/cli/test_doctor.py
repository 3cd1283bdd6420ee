"""``paceline doctor``: exit codes and formats."""

import json
from pathlib import Path

import pytest

from paceline.cli.app import run
from paceline.cli.flags import translate
from paceline.doctor.examples import STEP, looped
from paceline.doctor.findings import Diagnosis
from paceline.doctor.fixes.proving import Proof
from paceline.doctor.fixes.report import FixReport
from paceline.doctor.observed.launching import ScriptRun


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(looped([*STEP, "torch.cuda.synchronize()"]))
    return path


def test_only_bugs_fail_without_strict(script: Path) -> None:
    assert run(["doctor", str(script), "--static"]) == 0
    assert run(["doctor", str(script), "--static", "--strict"]) == 1
    script.write_text(looped(STEP[:4]))
    assert run(["doctor", str(script), "--static"]) == 1


def test_json_is_one_object(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(script), "--static", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (one,) = [finding for finding in report["findings"] if "sync" in finding["rule"]]
    assert (one["rule"], one["severity"]) == ("synchronized-each-turn", "cost")
    assert one["gain"] is None
    assert report["measured"] is False


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "doctor needs a script"),
        (["train.py"], "there is no script"),
        (["empty.py"], "does not use torch"),
        (["empty.py", "--fix"], "does not use torch"),
        (["broken.py", "--fix"], "broken.py:1 does not parse"),
        (["empty.py", "--undo"], "nothing was applied"),
        (["empty.py", "--apply"], "--fix --apply"),
        (["--statik", "empty.py"], "--static"),
        (["empty.py", "--seconds", "-1"], "--seconds must be"),
        (["empty.py", "--sarif"], "add --static"),
        (["train.py", "--static"], "there is no script"),
        ([".", "--static"], "is a folder"),
        (["x.py", "--static", "--json", "--sarif"], "two formats"),
        (["x.py", "--static", "--only", "fused"], "--only has no effect with --static"),
        (["x.py", "--static", "--stricct"], "'--stricct' is for a script, and no script runs"),
        (["x.py", "--static", "--fix", "--sarif"], "--sarif has no effect with --fix --static"),
        (["x.py", "--annotate", "--notes"], "--notes has no effect with --annotate"),
        (["m:net", "--input", "1,2", "--notes"], "--notes has no effect for a model"),
        (["x.py", "--static", "--json", "--notes"], "include the notes already; leave --notes out"),
        (["x.py", "--json", "--notes"], "include the notes already; leave --notes out"),
        (["x.py", "--undo", "--strict"], "--strict has no effect with --undo"),
        (["x.py", "--only", "fused", "--seconds", "0"], "--seconds 0 tries none"),
        (["x.py", "--seconds", "nan"], "--seconds must be"),
        (["--rules", "--sarif"], "--sarif has no effect with --rules"),
        (["m:net", "--input", "1,2", "--sarif"], "--sarif has no effect for a model"),
        (["train.py:3"], "there is no script train.py:3"),
        (["http://host/train.py", "--static"], "there is no script http:"),
        (["m:net"], "m:net needs the shape of an input"),
        (["m:net", "--fix"], "--fix has no effect for a model"),
        (["m:net", "--undo", "--annotate"], "--undo, --annotate have no effect for a model"),
        (["m:net", "--input", "1,2", "--static"], "--static has no effect for a model"),
        (["m:net", "--input", "1,2", "3"], "'3' is for a script, and no script runs for a"),
        (
            ["m:net", "--input", "1,2", "--input", "2,2"],
            "must have the same batch size, got [1, 2]",
        ),
    ],
)
def test_invalid_requests_are_refused(
    asked: list[str], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("print(1)\n")
    (tmp_path / "broken.py").write_text("import torch; print(\n")
    assert run(["doctor", *asked]) == 2
    assert said in capsys.readouterr().err


def test_rules_are_listed_and_tested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--rules"]) == 0
    assert "clip-before-unscale" in capsys.readouterr().out
    assert run(["doctor", "--test-rules"]) == 0
    assert "examples of" in capsys.readouterr().out


def test_unknown_flags_are_passed_to_the_script() -> None:
    own = ["--static", "train.py", "--seconds", "3"]
    assert translate(["doctor", *own[:2], "--lr", "0.1", *own[2:]]) == (
        ["doctor", *own], ["--", "--lr", "0.1"],
    )  # fmt: skip
    assert translate(["doctor", "train.py", "--", "--json"])[1] == ["--", "--json"]


def test_fix_prints_only_a_diff(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(script), "--static", "--fix"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("--- a/train.py\n+++ b/train.py\n")
    assert "-        torch.cuda.synchronize()\n" in captured.out
    assert "not proved" in captured.err
    script.write_text(looped(STEP))
    assert run(["doctor", str(script), "--static", "--fix"]) == 0
    assert "nothing can be fixed without changing" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_strict_fails_on_the_costs_of_a_model(
    flag: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = "nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))"
    (tmp_path / "net_with_a_bias.py").write_text(f"from torch import nn\nnet = {model}\n")
    requests = ["doctor", "net_with_a_bias:net", "--input", "8,3,8,8", *flag]
    assert run(requests) == 0
    assert run([*requests, "--strict"]) == 1


def test_exit_code_after_apply_describes_the_fixed_file(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(looped(STEP[:4]))
    assert run(["doctor", str(script), "--static", "--fix"]) == 1

    def fixed(asked: ScriptRun, found: Diagnosis, *, is_applied: bool) -> FixReport:
        if is_applied:
            asked.script.write_text(looped(STEP))
        proof = Proof(())
        return FixReport(script=found.script, diff="", proof=proof, left=(), kept_in="")

    monkeypatch.setattr("paceline.doctor.fixes.asked.fix", fixed)
    assert run(["doctor", str(script), "--fix"]) == 1
    assert run(["doctor", str(script), "--fix", "--apply"]) == 0


def test_strict_fails_on_unfixed_costs(script: Path) -> None:
    assert run(["doctor", str(script), "--static", "--fix", "--strict"]) == 1
