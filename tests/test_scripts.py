"""Every script of the corpus is right or refused by name: alone, and with several workers.

All configurations of every script: ``make scripts``.
"""

import itertools

import pytest

from scripts import SCRIPTS, harness
from scripts.base import PLAIN, SEVERAL, Record, Script, everywhere, several
from scripts.harness import DIFFERS, REFUSED, RIGHT, Cell, cell
from scripts.optimizers import adam, sgd, step_hook
from scripts.usual import network

EACH = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)


TWO, LOOSE = SEVERAL[0], SEVERAL[2]


def test_script_with_another_result_differs() -> None:
    assert cell(Script(sgd, like=adam), PLAIN).verdict == DIFFERS
    assert cell(Script(sgd, like=adam), TWO).words.startswith("weights 0.weight, entry 0: ")


def test_refusal_counts_only_if_announced_with_its_message() -> None:
    assert cell(Script(step_hook, refused=several("step hooks")), LOOSE).verdict == REFUSED
    assert cell(Script(step_hook, refused=several("one model")), LOOSE).verdict == DIFFERS
    assert cell(Script(step_hook), LOOSE).verdict == DIFFERS
    assert cell(Script(step_hook), TWO) == Cell(RIGHT)
    assert cell(Script(sgd, refused=several("anything")), TWO).verdict == DIFFERS
    assert cell(Script(sgd, refused=everywhere("anything", is_sure=False)), TWO) == Cell(RIGHT)


def never_ends(record: Record) -> None:
    """Never ends."""
    for number in itertools.count():
        record.noted.facts["numbers"] = [network()[0].weight * number]


def test_script_that_does_not_end_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "LIMIT_S", 0.2)
    assert "did not end within 0.2 s" in cell(Script(never_ends), PLAIN).words


def test_script_names_are_unique() -> None:
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS)
    assert all(script.summary for script in SCRIPTS)


@EACH
def test_script_alone_equals_its_plain_twin(script: Script) -> None:
    result = cell(script, PLAIN)
    assert result.verdict != DIFFERS, result.words


@EACH
def test_script_with_several_workers_is_right_or_refused(script: Script) -> None:
    result = cell(script, SEVERAL[SCRIPTS.index(script) % len(SEVERAL)])
    assert result.verdict != DIFFERS, result.words
