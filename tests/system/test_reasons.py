"""Why something failed is one sentence with the user's file and line."""

import sys

from paceline.system.reasons import reason


def test_reason_names_the_users_line_of_a_long_message() -> None:
    page = 'Traceback\nFile "/x/mine.py", line 7, in forward\n  if x.sum() > 0:\nbool of a proxy\n'
    assert reason(RuntimeError(page)) == "RuntimeError: if x.sum() > 0 (/x/mine.py:7)"


def test_error_without_message_is_named_by_its_class() -> None:
    assert reason(KeyError()) == "KeyError"


def test_reason_of_a_plain_error_needs_no_torch() -> None:
    assert "paceline.system.reasons" in sys.modules
    assert reason(ValueError("no")) == "ValueError: no"
