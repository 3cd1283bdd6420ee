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


def tables_of(page: str) -> list[list[dict[str, str]]]:
    """Return the tables of a page of results/: rows of cells by the names of their columns."""
    tables = list[list[list[str]]]()
    is_inside = False
    for line in (RESULTS / f"{page}.md").read_text().splitlines():
        if line[:1] != "|":
            is_inside = False
            continue
        if not is_inside:
            tables.append([])
            is_inside = True
        tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [[dict(zip(header, row, strict=True)) for row in rows] for header, _, *rows in tables]


def rows_of(page: str) -> list[dict[str, str]]:
    """Return the rows of the first table of a page of results/."""
    return tables_of(page)[0]
