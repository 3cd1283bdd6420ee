"""What the doctor finds in a script, as values: a rule's word about a line.

    Severity   BUG: wrong, or a crash | COST: could cost, not measured | NOTE: for a device
    ScriptFinding    file:line, what, why, fix
    Diagnosis  all of one script, in the order of the lines

No finding has a figure: reading alone weighs nothing. This module must not know rules.
"""

import enum
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """What a finding says; only a bug ends the command with exit code 1."""

    BUG = "bug"
    COST = "cost"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFinding:
    """One finding.

    Attributes:
        line, column: where, from 1.
        rule: the name of what found it; ``syntax`` where the script does not parse.
        what: what is there, with the script's own names.
        why: what comes of it.
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
    """What was found in one script.

    Attributes:
        script: its path.
        findings: in the order of the lines.
        num_rules: how many rules were tried.
        num_ignored: findings that a comment of the script takes back.
        has_torch: whether it uses torch at all; without, no rule was tried.
    """

    script: str
    findings: tuple[ScriptFinding, ...]
    num_rules: int
    num_ignored: int = 0
    has_torch: bool = True

    def of(self, severity: Severity) -> list[ScriptFinding]:
        return [one for one in self.findings if one.severity is severity]

    @property
    def bugs(self) -> list[ScriptFinding]:
        return self.of(Severity.BUG)

    @property
    def costs(self) -> list[ScriptFinding]:
        return self.of(Severity.COST)

    def to_json(self) -> dict[str, object]:
        """The one object of ``--json``."""
        return {
            "script": self.script,
            "findings": [one.to_json() for one in self.findings],
            "counts": {one.value: len(self.of(one)) for one in Severity},
            "rules": self.num_rules,
            "ignored": self.num_ignored,
            "uses_torch": self.has_torch,
            "measured": False,
        }
