"""The values of a diagnosis: what a rule says about a line of a script.

    Severity        BUG: wrong, or a crash | COST: could cost, not measured | NOTE: for a device
    ScriptFinding   line, what, why, fix
    Diagnosis       all findings of one script, in the order of the lines

No finding carries a figure: reading alone measures nothing. This module must not know rules.
"""

import enum
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """How bad a finding is; only a bug makes the command exit with code 1."""

    BUG = "bug"
    COST = "cost"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFinding:
    """One fault of a script, at one line.

    Attributes:
        line, column: where it begins, from 1.
        rule: the name of the rule that found it; ``syntax`` where the script does not parse.
        what: what is wrong, in terms of the script's own names.
        why: what it leads to.
        fix: what to write instead.
    """

    line: int
    column: int
    rule: str
    severity: Severity
    what: str
    why: str
    fix: str

    def to_json(self) -> dict[str, object]:
        return {
            "line": self.line, "column": self.column, "rule": self.rule,
            "severity": self.severity.value, "what": self.what, "why": self.why, "fix": self.fix,
            "gain": None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings of one script.

    Attributes:
        script: its path.
        findings: the findings, in the order of the lines.
        num_rules: how many rules were tried.
        num_ignored: how many findings a comment of the script suppresses.
        has_torch: whether the script uses torch at all; if not, no rule was tried.
    """

    script: str
    findings: tuple[ScriptFinding, ...]
    num_rules: int
    num_ignored: int = 0
    has_torch: bool = True

    def of(self, severity: Severity) -> list[ScriptFinding]:
        """The findings of this severity, in the order of the lines."""
        return [finding for finding in self.findings if finding.severity is severity]

    @property
    def bugs(self) -> list[ScriptFinding]:
        return self.of(Severity.BUG)

    @property
    def costs(self) -> list[ScriptFinding]:
        return self.of(Severity.COST)

    def to_json(self) -> dict[str, object]:
        """The JSON object that ``--json`` prints."""
        return {
            "script": self.script,
            "findings": [finding.to_json() for finding in self.findings],
            "counts": {severity.value: len(self.of(severity)) for severity in Severity},
            "rules": self.num_rules,
            "ignored": self.num_ignored,
            "uses_torch": self.has_torch,
            "measured": False,
        }
