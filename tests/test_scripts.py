"""Every script of the corpus is right, or refused by name: alone, and by several workers in turn.

All configurations of every script: ``make scripts``.
"""

import pytest

from scripts import SCRIPTS
from scripts.base import PLAIN, SEVERAL, Script
from scripts.harness import DIFFERS, cell

EACH = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)


def test_names_tell_scripts_apart() -> None:
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS)
    assert all(script.summary for script in SCRIPTS)


@EACH
def test_a_script_alone_is_its_plain_twin(script: Script, one_thread: None) -> None:
    found = cell(script, PLAIN)
    assert found.verdict != DIFFERS, found.words


@EACH
def test_a_script_by_several_workers_is_right_or_refused(script: Script, one_thread: None) -> None:
    found = cell(script, SEVERAL[SCRIPTS.index(script) % len(SEVERAL)])
    assert found.verdict != DIFFERS, found.words
