"""Report a script that does not parse as a finding, and repair missing commas.

    text -> ast.parse -> SyntaxError -> a comma where it lets the parser get further -> again

The repair is made in memory, so that the rules can go on; lines keep their numbers. This module
must not know rules.
"""

import ast
import io
import re
import tokenize

from .findings import ScriptFinding, Severity

_MAX_REPAIRS = 8
_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
_VALUE_TOKENS = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING}


def lines_of(text: str) -> list[str]:
    """Return the lines as Python and libcst count them, each with its end.

    `str.splitlines` also ends a line at a form feed and at other characters.
    """
    return _LINE.findall(text)


def repaired(text: str) -> tuple[str | None, list[ScriptFinding]]:
    """Return the text with its missing commas, and a finding for each fault.

    Returns:
        The repaired text, or None where no repair is known, and the findings.
    """
    findings: list[ScriptFinding] = []
    for _ in range(_MAX_REPAIRS):
        error = fault(text)
        if error is None:
            return text, findings
        place = _missing_comma(text, error)
        if place is None:
            findings.append(_finding(error))
            return None, findings
        line, column = place
        findings.append(
            ScriptFinding(
                line=line, column=column + 1, rule="syntax", severity=Severity.BUG,
                what="a comma is missing at the end of this value",
                why="Python ends here with a SyntaxError; the rest was read as if it stood there",
                fix=f"write , after column {column}",
            )
        )  # fmt: skip
        text = _with_comma(text, line, column)
    return None, findings


def fault(text: str) -> SyntaxError | None:
    """Return the error that Python raises on a text, or None if it parses."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError) as error:
        syntax_error = SyntaxError(str(error) or type(error).__name__)
        syntax_error.lineno = 1
        return syntax_error
    return None


def _finding(error: SyntaxError) -> ScriptFinding:
    quoted = f": {error.text.strip()}" if error.text else ""
    return ScriptFinding(
        line=error.lineno or 1, column=max(error.offset or 1, 1), rule="syntax",
        severity=Severity.BUG, what=f"this is not valid Python ({error.msg}){quoted}",
        why="nothing below can be read, so no rule was tried", fix="write it as Python takes it",
    )  # fmt: skip


def _missing_comma(text: str, error: SyntaxError) -> tuple[int, int] | None:
    """Return the line and column after which a comma lets the parser get further, or None."""
    if "comma" not in (error.msg or "") or error.lineno is None:
        return None
    last_line = (error.end_lineno or error.lineno) + 1
    for line, column in _seams(text, error.lineno, last_line):
        next_fault = fault(_with_comma(text, line, column))
        is_further = next_fault is not None and (next_fault.lineno or 0) > line
        if next_fault is None or is_further:
            return line, column
    return None


def _seams(text: str, first: int, last: int) -> list[tuple[int, int]]:
    """Return where, in these lines, a value ends and another begins with nothing in between."""
    seams: list[tuple[int, int]] = []
    previous: tokenize.TokenInfo | None = None
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in skipped:
                continue
            is_end = previous is not None and (
                previous.type in _VALUE_TOKENS or previous.string in ")]}"
            )
            if (
                is_end
                and token.type in _VALUE_TOKENS
                and previous is not None
                and first <= previous.end[0] <= last
            ):
                seams.append(previous.end)
            previous = token
    except (tokenize.TokenError, SyntaxError):
        pass
    return seams


def _with_comma(text: str, line: int, column: int) -> str:
    rows = lines_of(text)
    rows[line - 1] = f"{rows[line - 1][:column]},{rows[line - 1][column:]}"
    return "".join(rows)
