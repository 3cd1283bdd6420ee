"""Judge one script by reading it: try every rule on its facts, and never run it.

    text -> syntax -> Facts -> every rule -> findings, less those that a comment suppresses

A comment at the end of a line suppresses its findings: all of them with ``# doctor: ok``, those of
the named rules with ``# doctor: ok item-in-loop``.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError
from ..porting.tree import CannotDerive
from .catalogue import RULES
from .facts import Facts
from .findings import Diagnosis, ScriptFinding
from .rule import ScriptRule
from .syntax import fault, lines_of, repaired

_OK = re.compile(r"#\s*doctor:\s*ok\b([\w\-, ]*)")


def examine(path: Path) -> Diagnosis:
    """Read a script and return what all rules find in it.

    Raises:
        ConfigError: the path does not exist, is not a regular file, or cannot be read as Python.
    """
    return diagnose(read(path), str(path))


def read(path: Path) -> str:
    """Return a script's text, without a byte order mark and with ``\\n`` as its line end.

    Raises:
        ConfigError: the path does not exist, is not a regular file, or is not text in UTF-8.
    """
    if path.is_dir():
        scripts = sorted(script.name for script in path.glob("*.py"))
        hint = f"name one, such as {path / scripts[0]}" if scripts else "it contains no script"
        raise ConfigError(f"{path} is a folder, but doctor reads one script: {hint}")
    if not path.exists():
        raise ConfigError(f"there is no script {path} (looked in {Path.cwd()})")
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file; name a Python script")
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read as Python in UTF-8: {error}") from None


def diagnose(text: str, name: str = "script.py") -> Diagnosis:
    """Return what all rules find in a text; ``name`` is the path that the diagnosis names.

    Raises:
        ConfigError: Python can read it, but libcst cannot.
    """
    text = text.replace("\r\n", "\n")
    parsed, findings = (text, []) if fault(text) is None else repaired(text)
    if parsed is None:
        return Diagnosis(script=name, findings=tuple(findings), num_rules=0)
    try:
        facts = Facts(parsed)
    except CannotDerive:
        raise ConfigError(
            f"{name} is valid Python, but libcst cannot parse it, so no rule was tried; "
            "a backslash alone on a line may be the cause"
        ) from None
    if not facts.uses_torch:
        return Diagnosis(script=name, findings=tuple(findings), num_rules=0, has_torch=False)
    for rule in RULES.values():
        findings += findings_of(rule, facts)
    lines = lines_of(text)
    kept = [finding for finding in findings if not is_suppressed(finding.rule, finding.line, lines)]
    return Diagnosis(
        script=name,
        findings=tuple(
            sorted(kept, key=lambda finding: (finding.line, finding.column, finding.rule))
        ),
        num_rules=len(RULES),
        num_ignored=len(findings) - len(kept),
    )


def findings_of(rule: ScriptRule, facts: Facts) -> Iterator[ScriptFinding]:
    """Yield what one rule finds, at most one finding per line."""
    seen: set[int] = set()
    for found in rule.check(facts):
        line, column = facts.script.place(found.node)
        if line in seen:
            continue
        seen.add(line)
        yield ScriptFinding(
            line=line, column=column, rule=rule.name, severity=rule.severity,
            what=found.what or rule.what, why=rule.why, fix=found.fix or rule.fix,
        )  # fmt: skip


def is_suppressed(rule: str, line: int, lines: list[str]) -> bool:
    """Whether a comment on a line, counted from 1, suppresses what a rule finds there."""
    text = lines[line - 1] if line <= len(lines) else ""
    comment = _OK.search(text)
    if comment is None:
        return False
    names = comment[1].replace(",", " ").split()
    return not names or rule in names
