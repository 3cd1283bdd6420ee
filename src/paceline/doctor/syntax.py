"""A script that does not parse: the line as a finding, and where a comma is missing a repair.

    text -> ast.parse -> SyntaxError -> a comma at the place that makes it parse further -> again

The repair is made in memory, so that rules can go on; lines keep their numbers. This module must
not know rules.
"""

import ast
import io
import tokenize

from .findings import ScriptFinding, Severity

_MOST = 8
_ENDS = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING}


def repaired(text: str) -> tuple[str | None, list[ScriptFinding]]:
    """The text with its missing commas, and a finding for each fault; None: no repair is known."""
    found: list[ScriptFinding] = []
    for _ in range(_MOST):
        error = fault(text)
        if error is None:
            return text, found
        place = _missing_comma(text, error)
        if place is None:
            found.append(_finding(error))
            return None, found
        line, column = place
        found.append(
            ScriptFinding(
                line=line, column=column + 1, rule="syntax", severity=Severity.BUG,
                what="a comma is missing at the end of this value",
                why="Python ends here with a SyntaxError; the rest was read as if it stood there",
                fix=f"write , after column {column}",
            )
        )  # fmt: skip
        text = _with_comma(text, line, column)
    return None, found


def fault(text: str) -> SyntaxError | None:
    """What Python says of a text; None: it parses."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError) as error:
        made = SyntaxError(str(error) or type(error).__name__)
        made.lineno = 1
        return made
    return None


def _finding(error: SyntaxError) -> ScriptFinding:
    line = f": {error.text.strip()}" if error.text else ""
    return ScriptFinding(
        line=error.lineno or 1, column=max(error.offset or 1, 1), rule="syntax",
        severity=Severity.BUG, what=f"this is no valid Python ({error.msg}){line}",
        why="nothing below can be read, so no rule was tried", fix="write it as Python takes it",
    )  # fmt: skip


def _missing_comma(text: str, error: SyntaxError) -> tuple[int, int] | None:
    """Line and column after which a comma brings the parser further."""
    if "comma" not in (error.msg or "") or error.lineno is None:
        return None
    last = (error.end_lineno or error.lineno) + 1
    for line, column in _seams(text, error.lineno, last):
        after = fault(_with_comma(text, line, column))
        is_further = after is not None and (after.lineno or 0) > line
        if after is None or is_further:
            return line, column
    return None


def _seams(text: str, first: int, last: int) -> list[tuple[int, int]]:
    """Where a value ends and another begins without anything between, in these lines."""
    found: list[tuple[int, int]] = []
    before: tokenize.TokenInfo | None = None
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    try:
        for one in tokenize.generate_tokens(io.StringIO(text).readline):
            if one.type in skipped:
                continue
            is_end = before is not None and (before.type in _ENDS or before.string in ")]}")
            if (
                is_end
                and one.type in _ENDS
                and before is not None
                and first <= before.end[0] <= last
            ):
                found.append(before.end)
            before = one
    except (tokenize.TokenError, SyntaxError):
        pass
    return found


def _with_comma(text: str, line: int, column: int) -> str:
    rows = text.splitlines(keepends=True)
    rows[line - 1] = f"{rows[line - 1][:column]},{rows[line - 1][column:]}"
    return "".join(rows)
