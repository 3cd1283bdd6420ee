"""Fixes: their edits, their proof, and the file they are written to."""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.doctor.catalogue import RULES
from paceline.doctor.examine import diagnose
from paceline.doctor.examples import STEP, looped
from paceline.doctor.fixes.applying import ScriptFile, apply, undo
from paceline.doctor.fixes.asked import fix_by_text
from paceline.doctor.fixes.mending import Edit, diff_of, edits_for, left_alone, with_edits
from paceline.doctor.fixes.proving import prove
from paceline.doctor.observed.observation import Price, PriceOutcome
from paceline.doctor.observed.record import StepRecord
from paceline.errors import ConfigError

MENDING = {name: rule for name, rule in RULES.items() if rule.mend is not None}
UNTOUCHED = {
    ("made-then-moved", "torch.randn(64, 16).to(device)"),
    ("best-not-copied", "best_model = model"),
}
"""Another device draws other random numbers; copying a model may need more than deepcopy."""


@pytest.mark.parametrize("name", MENDING)
def test_fix_repairs_bad_examples_and_leaves_good_ones(name: str) -> None:
    for text in MENDING[name].sick:
        edits = [one for one in edits_for(text) if one.name == name]
        if not edits:
            assert any(rule == name and part in text for rule, part in UNTOUCHED)
            continue
        after = with_edits(text, edits)
        ast.parse(after)
        assert name not in {finding.rule for finding in diagnose(after).findings}
    for text in MENDING[name].healthy:
        assert name not in {one.name for one in edits_for(text)}


EVALUATED = """
from torch.optim import SGD
from torch.utils.data import DataLoader
from torch import nn
model = nn.Linear(4, 2)
optimizer = SGD(model.parameters(), lr=0.1)
train, test = DataLoader(data), DataLoader(more)
for x, y in train:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
for x, y in test:
    hits = (model(x).argmax(1) == y).sum()
"""


@pytest.mark.parametrize(
    "row",
    [
        "import torch.nn as nn",
        "import torch as th",
        "import torchvision",
        "def f():\n    import torch",
    ],
)
def test_fix_uses_only_names_the_script_has(row: str) -> None:
    text = f"{row}{EVALUATED}"
    assert "evaluated-with-gradients" in {finding.rule for finding in diagnose(text).findings}
    assert edits_for(text) == []
    for also in ("import torch\n", "import torch.nn\n", "import os, torch\n"):
        assert [edit.name for edit in edits_for(also + text)] == ["evaluated-with-gradients"]


OWN = ",\n    pin_memory=True"
GIVEN = (
    ("data, batch_size=64", ", pin_memory=True", ""), ("data", ", pin_memory=True", ""),
    ("\n    data, batch_size=64", ", pin_memory=True", "\n"), ("\n    data", OWN, "\n"),
    ("\n    data,\n    batch_size=64", OWN, "\n"), ("\n    data,\n    batch_size=64", OWN, ",\n"),
    ("\n    data,  # all\n    batch_size=64", OWN, "\n"),
)  # fmt: skip
"""The arguments of a call, how one more argument is written after them, and how the call ends."""


@pytest.mark.parametrize(("given", "more", "end"), GIVEN)
def test_added_argument_follows_the_layout_of_the_call(given: str, more: str, end: str) -> None:
    price = Price(
        name="pin_memory=True", fix="pin_memory=True in the DataLoader", line=2,
        outcome=PriceOutcome.WORTH, words=(("pin_memory", "True"),),
    )  # fmt: skip
    head = "from torch.utils.data import DataLoader\nloader = DataLoader("
    (edit,) = edits_for(f"{head}{given}{end})\n", [price])
    assert edit.apply(f"{head}{given}{end})\n") == f"{head}{given}{more}{end})\n"


def test_suppressed_finding_is_not_fixed() -> None:
    text = looped([*STEP, "torch.cuda.synchronize()  # doctor: ok"])
    assert edits_for(text) == []
    assert edits_for(f"# \x0c a new page\n{text}") == []


def test_measured_fix_adds_arguments_to_the_call_in_its_line() -> None:
    text = looped()
    line = next(i for i, row in enumerate(text.splitlines(), 1) if row.startswith("loader ="))
    price = Price(
        name="num_workers=4", fix="num_workers=4 in the DataLoader", outcome=PriceOutcome.WORTH,
        line=line, words=(("num_workers", "4"), ("pin_memory", "False")),
    )  # fmt: skip
    (edit,) = edits_for(text, [price])
    assert "shuffle=True, pin_memory=False, num_workers=4)" in edit.apply(text)


def test_fixes_that_change_the_mathematics_are_not_made() -> None:
    text = looped([*STEP[:2], "loss = loss_fn(model(x).softmax(1), y)", *STEP[3:], "total += loss"],
                  before="total = 0.0")  # fmt: skip
    assert [edit.name for edit in edits_for(text)] == ["loss-keeps-graph"]
    assert [one.rule for one in left_alone(diagnose(text))] == ["softmax-into-cross-entropy"]


def test_unfixable_bug_is_reported_with_its_line(tmp_path: Path) -> None:
    kept = "if loss.item() < best:\n    best_model = model"
    text = looped(before="best = 9.0\nbest_model = None", after=kept, end="print(best_model)")
    path = tmp_path / "train.py"
    path.write_text(text)
    report = fix_by_text(path, diagnose(text, "train.py"))
    assert report.diff == ""
    line = text[: text.index("best_model = model")].count("\n") + 1
    (messages,) = [one for one in report.lines() if "best-not-copied" in one]
    assert messages.startswith(f"left alone: train.py:{line} best-not-copied: ")
    assert [one["rule"] for one in report.to_json()["left_alone"]] == ["best-not-copied"]  # type: ignore[attr-defined]  # rows of JSON


PLAIN = looped([*STEP, "torch.cuda.synchronize()"])
ENDED = {
    "Unix": PLAIN, "Windows": PLAIN.replace("\n", "\r\n"), "with a mark": f"\ufeff{PLAIN}",
    "one of Windows": PLAIN.replace("import torch\n", "import torch\r\n", 1),
    "with a new page": PLAIN.replace("optimizer.step()", "optimizer.step()  # \x0c."),
}  # fmt: skip
"""A script from which the line with synchronize() is removed, by its line endings."""


@pytest.mark.parametrize("before", ENDED.values(), ids=ENDED)
def test_each_line_keeps_its_line_ending(before: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(before.encode())
    gone = next(row for row in before.split("\n") if "synchronize" in row)
    after = before.replace(f"{gone}\n", "").encode()
    report = fix_by_text(path, diagnose(before.removeprefix("\ufeff")))
    changed = [row for row in report.diff.split("\n") if row.startswith(("+", "-"))][2:]
    assert changed == [f"-{gone}"]
    if shutil.which("patch"):
        (tmp_path / "fix.diff").write_bytes(report.diff.encode())
        subprocess.run(["patch", "-p1", "-i", "fix.diff"], cwd=tmp_path, check=True)
        assert path.read_bytes() == after
        path.write_bytes(before.encode())
    source = ScriptFile.read(path)
    apply(source, with_edits(source.text, report.proof.kept))
    assert path.read_bytes() == after
    undo(path)
    assert path.read_bytes() == before.encode()


def test_diff_marks_a_missing_final_newline() -> None:
    assert diff_of("a\nb", "a\nc", "x.py") == (
        "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+c\n"
        "\\ No newline at end of file\n"
    )
    assert diff_of("a\n", "a\n", "x.py") == ""


# -- proof ---------------------------------------------------------------------------------------

EDITS = [Edit(name, "", 1, lambda text, name=name: text + name) for name in ("a", "b", "c")]  # type: ignore[misc]  # mypy infers no type for a default argument


def test_only_edits_that_change_no_value_are_kept() -> None:
    def recorded(text: str) -> StepRecord:
        return StepRecord(
            losses=("1",) * 20, gradients=("changed" if "b" in text else "same",) * 20
        )

    proof = prove("", EDITS, recorded)
    assert [one.name for one in proof.kept] == ["a", "c"]
    assert [(one.name, why) for one, why in proof.dropped] == [("b", "the gradients of step 1")]
    assert proof.num_steps == 20
    assert with_edits("", proof.kept) == "ac"


def test_nondeterministic_script_proves_nothing() -> None:
    runs = iter(range(10))

    def recorded(text: str) -> StepRecord:
        return StepRecord(losses=(str(next(runs)),), gradients=("",))

    proof = prove("", EDITS, recorded)
    assert proof.kept == ()
    assert "two runs of the unchanged script differ in the loss of step 1" in proof.unproved


def test_edit_that_breaks_the_script_is_dropped() -> None:
    def recorded(text: str) -> StepRecord:
        if "c" in text:
            raise ConfigError("it fails")
        return StepRecord(losses=("1",), gradients=("1",))

    proof = prove("", EDITS, recorded)
    assert [one.name for one in proof.kept] == ["a", "b"]


def test_edit_of_a_line_that_did_not_run_is_left_out() -> None:
    def recorded(text: str) -> StepRecord:
        return StepRecord(losses=("1",), gradients=("1",), lines=(1, 2, 4))

    edits = [Edit(name, "", 1, lambda text, name=name: text.replace(name, "new")) for name in "adc"]  # type: ignore[misc]  # mypy infers no type for a default argument
    inserted = Edit("inserted", "", 3, lambda text: text.replace("(c)\n", "(c)\n    print(e)\n"))
    proof = prove("a = 1\nif a:\n    print(c)\nb, d = 2, 3\n", [*edits, inserted], recorded)
    assert [one.name for one in proof.kept] == ["a", "d"]
    assert [(one.name, line) for one, line in proof.unreached] == [("c", 3), ("inserted", 3)]


def test_place_that_did_not_run_leaves_the_others_fixed() -> None:
    text = looped([*STEP, "torch.cuda.synchronize()", "seen = x", "torch.cuda.synchronize()"])
    gone, left = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if "torch.cuda.synchronize()" in line
    ]

    def recorded(text: str) -> StepRecord:
        lines = tuple(number for number in range(1, 100) if number != left)
        return StepRecord(losses=("1",), gradients=("1",), lines=lines)

    proof = prove(text, edits_for(text), recorded)
    assert [(edit.name, edit.line) for edit in proof.kept] == [("synchronized-each-turn", gone)]
    assert [(edit.line, line) for edit, line in proof.unreached] == [(left, left)]
    assert with_edits(text, proof.kept).count("synchronize") == 1


# -- file ----------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_bytes(b"\xef\xbb\xbfa = 1\r\nb = 2\r\n")
    path.chmod(0o754)
    return path


def test_apply_and_undo_restore_the_same_file(script: Path) -> None:
    before = script.read_bytes()
    source = ScriptFile.read(script)
    assert source.text == "a = 1\r\nb = 2\r\n"
    kept = apply(source, "a = 1\r\nb = 3\r\n")
    assert script.read_bytes() == b"\xef\xbb\xbfa = 1\r\nb = 3\r\n"
    assert script.stat().st_mode & 0o777 == 0o754
    undo(script)
    assert script.read_bytes() == before
    assert not kept.exists()
    with pytest.raises(ConfigError, match="nothing was applied"):
        undo(script)


def test_file_changed_meanwhile_is_not_overwritten(script: Path) -> None:
    source = ScriptFile.read(script)
    script.write_text("a = 5\n")
    with pytest.raises(ConfigError, match="was changed since it was read"):
        apply(source, "a = 2\n")
    assert script.read_text() == "a = 5\n"
    apply(ScriptFile.read(script), "a = 2\n")
    script.write_text("a = 6\n")
    with pytest.raises(ConfigError, match="was changed since --apply"):
        undo(script)
    assert script.read_text() == "a = 6\n"


def test_read_only_file_is_left_unchanged(script: Path) -> None:
    script.chmod(0o444)
    with pytest.raises(ConfigError, match="is read-only"):
        apply(ScriptFile.read(script), "a = 2\n")
