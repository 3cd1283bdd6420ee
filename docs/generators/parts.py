"""Shared by several pages: paths, and one member's part of a docstring."""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "results"


def indented(text: str) -> list[str]:
    """Return the lines as a Markdown code block, which keeps their line breaks."""
    return [f"    {line}".rstrip() for line in text.splitlines()]


def said_of(name: str, member: type, family: Iterable[str]) -> str:
    """Return the part of the module docstring that begins with ``name: ``."""
    text = inspect.getdoc(inspect.getmodule(member)) or ""
    parts = re.split(rf"^(?=(?:{'|'.join(family)}): )", text, flags=re.MULTILINE)
    (own_part,) = [part for part in parts if part.startswith(f"{name}: ")]
    return own_part.rstrip()
