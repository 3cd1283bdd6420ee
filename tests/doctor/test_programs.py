"""The three schematic programs of a lesson on tensor cores, with all their planted faults."""

from pathlib import Path

import pytest

from paceline.doctor.annotated import annotate, rights_of
from paceline.doctor.examine import examine
from paceline.doctor.examples import STEP, looped, scaled

PROGRAMS = Path(__file__).parent / "programs"
FAULTS = {
    1: {
        (5, "tensor-core-sizes"), (8, "feature-mismatch"), (8, "linear-chain"),
        (12, "tensor-core-sizes"), (13, "comment-differs"), (13, "tensor-core-sizes"),
        (16, "no-mixed-precision"),
    },
    2: {
        (5, "comment-differs"), (6, "ragged-last-batch"), (9, "feature-mismatch"),
        (17, "model-gets-loader"), (17, "no-mixed-precision"),
    },
    3: {
        (5, "target-range"), (10, "syntax"), (10, "tensor-core-sizes"), (16, "syntax"),
        (16, "tensor-core-sizes"), (17, "sigmoid-at-end"), (21, "model-gets-loader"),
        (21, "output-size"), (21, "no-mixed-precision"),
    },
}  # fmt: skip
"""Program -> line and rule of each fault."""
WORDS = {
    1: ("write 15 for 128", "128 is its number of samples", "says 3 classes", "outputs 5",
        "4 and 5 are not multiples of 8", "the 15 features of the data are not a multiple of 8"),
    2: ("says 15 features and the data has 16", "the last one has 59", "write model(batch)"),
    3: ("output is 18x18 and the target 26x26", "normal noise", "comma is missing",
        "3 is not a multiple of 8", "1 is not a multiple of 8"),
}  # fmt: skip


@pytest.mark.parametrize("number", FAULTS)
def test_exactly_the_faults_of_each_program_are_found(number: int) -> None:
    findings = examine(PROGRAMS / f"case_{number}.txt").findings
    assert {(finding.line, finding.rule) for finding in findings} == FAULTS[number]
    text = " ".join(f"{finding.what} {finding.fix}" for finding in findings)
    assert [one for one in WORDS[number] if one not in text] == []


RIGHT = {
    1: ((9, "64 and 32 are multiples of 8"),),
    2: ((10, "ReLU keeps the layers around it from being one linear map, and it is cheap"),
        (6, "64 samples a batch")),
    3: ((7, "drop_last=True: every batch has the same size"), (10, "it takes the 3 features"),
        (11, "ReLU keeps"), (12, "64 and 128 are multiples of 8: tensor cores need no padding")),
}  # fmt: skip
"""Program -> line and first words of each correct part."""


@pytest.mark.parametrize("number", RIGHT)
def test_listing_explains_what_is_right(number: int) -> None:
    path = PROGRAMS / f"case_{number}.txt"
    text = path.read_text()
    rights = rights_of(text)
    for line, words in RIGHT[number]:
        assert [right for right in rights if right.line == line and right.what.startswith(words)]
    rows = list(annotate(text, examine(path), rights))
    assert [row[6:] for row in rows if row[4:5] == "|" and row[6:]] == [
        row for row in text.splitlines() if row
    ]
    assert sum(row[4:6] == "! " for row in rows) == len(examine(path).bugs)


def test_only_correct_parts_of_a_step_are_confirmed() -> None:
    clip = "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    messages = {one.what.partition(":")[0] for one in rights_of(scaled(clip=clip))}
    assert {"unscale_ comes before clipping", "under autocast"} <= messages
    assert "backward() is outside autocast, as it should be" in messages
    sick = looped([*STEP[:3], STEP[3], STEP[1], STEP[4]])
    assert not [one for one in rights_of(sick) if one.what.startswith("gradients are set to zero")]
