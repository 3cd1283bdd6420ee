"""The diagnosis of a whole script, including unreadable ones."""

import re
from pathlib import Path

import pytest

from paceline.doctor import examine as module
from paceline.doctor.catalogue import RULES
from paceline.doctor.examine import diagnose, examine
from paceline.doctor.examples import STEP, looped
from paceline.doctor.findings import Severity
from paceline.doctor.rendering import render_diagnosis
from paceline.doctor.sarif import to_sarif
from paceline.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
SICK = looped([*STEP, "total += loss"], before="total = 0.0")


def test_syntax_error_is_a_finding() -> None:
    (result,) = diagnose("import torch\nfor x in y\n    print(x)\n").findings
    assert (result.line, result.rule, result.severity) == (2, "syntax", Severity.BUG)
    assert "expected ':'" in result.what


@pytest.mark.parametrize(
    "text", ["", "\n", "\x00", "(" * 500, "def f(:\n", "'''", "\t x\n  y", "é = 1"]
)
def test_any_text_can_be_diagnosed(text: str) -> None:
    assert diagnose(text).findings is not None


def test_text_that_only_libcst_refuses_is_an_error_of_the_user() -> None:
    with pytest.raises(ConfigError, match=r"odd\.py is valid Python, but libcst cannot parse it"):
        diagnose("import torch\nif True:\n\\\n    x = 1\n", "odd.py")


@pytest.mark.parametrize("copied", ["torch.ones(3).to('cuda'", "y.to('cpu'"])
def test_function_in_one_line_has_no_next_line(copied: str) -> None:
    text = f"import torch\ndef f(y): t = {copied}, non_blocking=True); return t\n"
    assert diagnose(text).findings == ()


def test_rules_still_run_after_a_missing_comma() -> None:
    findings = diagnose(SICK.replace("nn.Linear(16, 64), nn", "nn.Linear(16, 64) nn")).findings
    assert {"syntax", "loss-keeps-graph"} <= {finding.rule for finding in findings}


def test_script_without_torch_is_reported() -> None:
    diagnosis = diagnose("print('hello')\n")
    assert not diagnosis.has_torch
    assert "does not use torch" in next(render_diagnosis(diagnosis, with_notes=False))


def test_comment_suppresses_a_finding() -> None:
    assert diagnose(SICK).of(Severity.BUG)
    for message in ("# doctor: ok", "# doctor: ok loss-keeps-graph"):
        diagnosis = diagnose(SICK.replace("total += loss", f"total += loss  {message}"))
        assert diagnosis.of(Severity.BUG) == []
        assert diagnosis.num_ignored == 1
    other = SICK.replace("total += loss", "total += loss  # doctor: ok sync")
    assert diagnose(other).of(Severity.BUG)


@pytest.mark.parametrize("character", ["\x0c", "\x1c", "\u2028", "\r"])
def test_comment_is_looked_up_on_the_line_of_its_finding(character: str) -> None:
    text = SICK.replace("total += loss", "total += loss  # doctor: ok")
    diagnosis = diagnose(f"# {character}# a comment\n{text}")
    assert diagnosis.of(Severity.BUG) == []
    assert diagnosis.num_ignored == 1


def test_rules_suppressed_in_the_docs_exist() -> None:
    pages = [(ROOT / "docs" / "doctor.md").read_text(), module.__doc__ or ""]
    named = [set(re.findall(r"# doctor: ok ([\w-]+)", one)) for one in pages]
    assert all(named)
    assert set[str]().union(*named) <= RULES.keys()


@pytest.mark.parametrize(
    "row", ["import os, torch", "from torch import *", "import torch.nn as nn"]
)
def test_every_form_of_importing_torch_is_recognized(row: str) -> None:
    text = looped(STEP[:4]).replace("import torch\n", f"{row}\nimport torch\n")
    assert diagnose(f"{row}\nprint(1)\n").has_torch
    assert {finding.rule for finding in diagnose(text).findings} >= {"step-missing"}


@pytest.mark.parametrize("row", ["import torchlike", "from .torch import nn", "import my.torch"])
def test_similar_module_names_are_not_torch(row: str) -> None:
    assert not diagnose(f"{row}\n").has_torch


def test_windows_line_endings_do_not_change_findings() -> None:
    plain = diagnose(SICK).findings
    assert diagnose(SICK.replace("\n", "\r\n")).findings == plain


def test_invalid_script_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "none.py", "there is no script"),
        (tmp_path / "binary", "cannot be read as Python"),
    ):
        with pytest.raises(ConfigError, match=message):
            examine(path)


def test_sarif_lists_each_rule_once_and_each_line() -> None:
    diagnosis = diagnose(SICK, "train.py")
    run = to_sarif(diagnosis)["runs"][0]  # type: ignore[index]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules))
    for one, finding in zip(run["results"], diagnosis.findings, strict=True):
        assert rules[one["ruleIndex"]] == one["ruleId"] == finding.rule
        assert one["locations"][0]["physicalLocation"]["region"]["startLine"] == finding.line


def test_examine_does_not_run_the_script(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import torch\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    examine(path)
    assert not (tmp_path / "ran").exists()


def test_self_referencing_name_is_not_followed_forever() -> None:
    text = """
import torch
class Trainer:
    def make(self, tool):
        tool = tool.make(tool)
        return tool
    def train(self, tool, loss):
        with torch.autocast("cuda"):
            tool = tool.train(tool, loss)
        loss.backward()
"""
    assert diagnose(text).findings is not None
