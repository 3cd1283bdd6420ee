"""The three schematic programs of a lesson on tensor cores: every fault that was put into them."""

from pathlib import Path

import pytest

from paceline.doctor.examine import examine

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
"""Program -> line and rule of each."""
WORDS = {
    1: ("write 15 for 128", "128 is its number of samples", "says 3 classes", "makes 5",
        "4 and 5 are no multiples of 8", "the 15 features of the data are no multiple of 8"),
    2: ("says 15 features and the data has 16", "the last one has 59", "write model(batch)"),
    3: ("output is 18x18 and the target 26x26", "normal noise", "comma is missing",
        "3 is no multiple of 8", "1 is no multiple of 8"),
}  # fmt: skip


@pytest.mark.parametrize("number", FAULTS)
def test_every_fault_of_a_program_is_found_and_nothing_else(number: int) -> None:
    found = examine(PROGRAMS / f"case_{number}.txt").findings
    assert {(one.line, one.rule) for one in found} == FAULTS[number]
    said = " ".join(f"{one.what} {one.fix}" for one in found)
    assert [one for one in WORDS[number] if one not in said] == []
