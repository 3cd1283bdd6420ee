"""What several pages need: where things lie, and a docstring's part of one member."""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "results"


def indented(text: str) -> list[str]:
    """As Markdown shows text that is not to be set anew."""
    return [f"    {line}".rstrip() for line in text.splitlines()]


def said_of(name: str, member: type, family: Iterable[str]) -> str:
    """From the line that begins with its name to that of its sister, or to the end."""
    text = inspect.getdoc(inspect.getmodule(member)) or ""
    parts = re.split(rf"^(?=(?:{'|'.join(family)}): )", text, flags=re.MULTILINE)
    (mine,) = [part for part in parts if part.startswith(f"{name}: ")]
    return mine.rstrip()
