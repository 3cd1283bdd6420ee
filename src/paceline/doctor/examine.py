"""One script, read and judged: the rules are tried on its facts, and it is never run.

    text -> syntax -> Facts -> every rule -> findings, less those that a comment takes back

A line that ends in ``# doctor: ok`` or ``# doctor: ok item-in-loop`` is not spoken of (again).
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError
from .catalogue import RULES
from .facts import Facts
from .findings import Diagnosis, ScriptFinding
from .rule import ScriptRule
from .syntax import fault, repaired

_OK = re.compile(r"#\s*doctor:\s*ok\b([\w\-, ]*)")


def examine(path: Path) -> Diagnosis:
    """Read a script and try all rules.

    Raises:
        ConfigError: it is not there, no file, or no text.
    """
    return diagnose(read(path), str(path))


def read(path: Path) -> str:
    """A script's text, without a mark at its beginning, lines ended as Unix does.

    Raises:
        ConfigError: it is not there, no file, or no text.
    """
    if path.is_dir():
        inside = sorted(one.name for one in path.glob("*.py"))
        hint = f"name one, such as {path / inside[0]}" if inside else "no script lies in it"
        raise ConfigError(f"{path} is a folder, and doctor reads one script: {hint}")
    if not path.exists():
        raise ConfigError(f"there is no script {path} (looked in {Path.cwd()})")
    if not path.is_file():
        raise ConfigError(f"{path} is no regular file; name a script of Python")
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read as Python in UTF-8: {error}") from None


def diagnose(text: str, name: str = "script.py") -> Diagnosis:
    """Judge one text; ``name`` is its path."""
    text = text.replace("\r\n", "\n")
    mended, found = (text, []) if fault(text) is None else repaired(text)
    if mended is None:
        return Diagnosis(script=name, findings=tuple(found), num_rules=0)
    facts = Facts(mended)
    if not facts.uses_torch:
        return Diagnosis(script=name, findings=tuple(found), num_rules=0, has_torch=False)
    for rule in RULES.values():
        found += findings_of(rule, facts)
    rows = text.splitlines()
    kept = [one for one in found if not is_taken_back(one.rule, one.line, rows)]
    return Diagnosis(
        script=name,
        findings=tuple(sorted(kept, key=lambda one: (one.line, one.column, one.rule))),
        num_rules=len(RULES),
        num_ignored=len(found) - len(kept),
    )


def findings_of(rule: ScriptRule, facts: Facts) -> Iterator[ScriptFinding]:
    """What one rule finds, each line once."""
    seen: set[int] = set()
    for one in rule.check(facts):
        line, column = facts.script.place(one.node)
        if line in seen:
            continue
        seen.add(line)
        yield ScriptFinding(
            line=line, column=column, rule=rule.name, severity=rule.severity,
            what=one.what or rule.what, why=rule.why, fix=one.fix or rule.fix,
        )  # fmt: skip


def is_taken_back(rule: str, line: int, rows: list[str]) -> bool:
    """Whether a comment of the script takes back what a rule finds in a line, from 1."""
    row = rows[line - 1] if line <= len(rows) else ""
    said = _OK.search(row)
    if said is None:
        return False
    names = said[1].replace(",", " ").split()
    return not names or rule in names
