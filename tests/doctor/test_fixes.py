"""Fixes: what they change in a text, what is proved of them, and the file that they go into."""

import ast
from pathlib import Path

import pytest

from paceline.doctor.catalogue import RULES
from paceline.doctor.examine import diagnose
from paceline.doctor.examples import STEP, looped
from paceline.doctor.fixes.applying import ScriptFile, apply, undo
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
"""Random numbers of another device are others; copying a model may want more than deepcopy."""


@pytest.mark.parametrize("name", MENDING)
def test_a_mend_heals_what_is_sick_and_leaves_what_is_healthy(name: str) -> None:
    for text in MENDING[name].sick:
        edit = next((one for one in edits_for(text) if one.name == name), None)
        if edit is None:
            assert any(rule == name and part in text for rule, part in UNTOUCHED)
            continue
        after = edit.made(text)
        ast.parse(after)
        assert name not in {one.rule for one in diagnose(after).findings}
    for text in MENDING[name].healthy:
        assert name not in {one.name for one in edits_for(text)}


def test_what_a_comment_takes_back_is_not_mended() -> None:
    text = looped([*STEP, "torch.cuda.synchronize()  # doctor: ok"])
    assert edits_for(text) == []


def test_a_price_with_words_becomes_arguments_of_the_call_in_its_line() -> None:
    text = looped()
    line = next(i for i, row in enumerate(text.splitlines(), 1) if row.startswith("loader ="))
    price = Price(
        name="num_workers=4", fix="num_workers=4 in the DataLoader", outcome=PriceOutcome.WORTH,
        line=line, words=(("num_workers", "4"), ("pin_memory", "False")),
    )  # fmt: skip
    (edit,) = edits_for(text, [price])
    assert "shuffle=True, pin_memory=False, num_workers=4)" in edit.made(text)


def test_what_changes_the_mathematics_is_left_alone() -> None:
    text = looped([*STEP[:2], "loss = loss_fn(model(x).softmax(1), y)", *STEP[3:], "total += loss"],
                  before="total = 0.0")  # fmt: skip
    assert [one.name for one in edits_for(text)] == ["loss-keeps-graph"]
    assert [one.rule for one in left_alone(diagnose(text))] == ["softmax-into-cross-entropy"]


def test_a_diff_is_one_that_patch_takes() -> None:
    assert diff_of("a\nb", "a\nc", "x.py") == (
        "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+c\n"
        "\\ No newline at end of file\n"
    )
    assert diff_of("a\n", "a\n", "x.py") == ""


# -- proof ---------------------------------------------------------------------------------------

EDITS = [Edit(name, "", lambda text, name=name: text + name) for name in ("a", "b", "c")]  # type: ignore[misc]


def test_only_edits_that_change_no_number_are_kept() -> None:
    def recorded(text: str) -> StepRecord:
        return StepRecord(
            losses=("1",) * 20, gradients=("changed" if "b" in text else "same",) * 20
        )

    proof = prove("", EDITS, recorded)
    assert [one.name for one in proof.kept] == ["a", "c"]
    assert [(one.name, why) for one, why in proof.dropped] == [("b", "the gradients of step 1")]
    assert proof.num_steps == 20
    assert with_edits("", proof.kept) == "ac"


def test_a_script_that_differs_by_itself_proves_nothing() -> None:
    runs = iter(range(10))

    def recorded(text: str) -> StepRecord:
        return StepRecord(losses=(str(next(runs)),), gradients=("",))

    proof = prove("", EDITS, recorded)
    assert proof.kept == ()
    assert "differs by itself in the loss of step 1" in proof.unproved


def test_an_edit_that_ends_the_script_is_dropped() -> None:
    def recorded(text: str) -> StepRecord:
        if "c" in text:
            raise ConfigError("it fails")
        return StepRecord(losses=("1",), gradients=("1",))

    proof = prove("", EDITS, recorded)
    assert [one.name for one in proof.kept] == ["a", "b"]


# -- file ----------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_bytes(b"\xef\xbb\xbfa = 1\r\nb = 2\r\n")
    path.chmod(0o754)
    return path


def test_applied_and_taken_back_it_is_the_same_file(script: Path) -> None:
    before = script.read_bytes()
    source = ScriptFile.read(script)
    assert source.text == "a = 1\nb = 2\n"
    kept = apply(source, "a = 1\nb = 3\n")
    assert script.read_bytes() == b"\xef\xbb\xbfa = 1\r\nb = 3\r\n"
    assert script.stat().st_mode & 0o777 == 0o754
    undo(script)
    assert script.read_bytes() == before
    assert not kept.exists()
    with pytest.raises(ConfigError, match="nothing was applied"):
        undo(script)


def test_nothing_is_written_over_what_somebody_changed(script: Path) -> None:
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


def test_a_read_only_file_is_left_as_it_is(script: Path) -> None:
    script.chmod(0o444)
    with pytest.raises(ConfigError, match="is read-only"):
        apply(ScriptFile.read(script), "a = 2\n")
