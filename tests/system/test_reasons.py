"""Why something failed is one sentence with the user's file and line."""

import sys

from paceline.system.reasons import reason


def test_the_place_in_a_page_of_words_is_the_users() -> None:
    page = 'Traceback\nFile "/x/mine.py", line 7, in forward\n  if x.sum() > 0:\nbool of a proxy\n'
    assert reason(RuntimeError(page)) == "RuntimeError: if x.sum() > 0 (/x/mine.py:7)"


def test_an_error_without_words_is_called_by_its_kind() -> None:
    assert reason(KeyError()) == "KeyError"


def test_torch_is_not_imported_for_it() -> None:
    assert "paceline.system.reasons" in sys.modules
    assert reason(ValueError("no")) == "ValueError: no"
