"""The pages of measured figures each name one program and its commit."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "results").glob("*.md"))
COMMAND = re.compile(r"^`(?:python (bench/\w+\.py)[^`]*|make (\w+))`", re.MULTILINE)
COMMIT = re.compile(r"\bcommit ([0-9a-f]{7,40})\b(?!\+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_names_its_program_and_commit(page: Path) -> None:
    text = page.read_text()
    command = COMMAND.search(text)
    assert command is not None, "which command made it?"
    assert command[1] is None or (ROOT / command[1]).is_file(), command[1]
    assert "--only" not in command[0], "a page is one whole run"
    assert COMMIT.search(text) is not None, "at which commit?"
