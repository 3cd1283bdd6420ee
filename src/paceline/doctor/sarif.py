"""Convert a diagnosis to SARIF 2.1.0, which code hosts show beside the lines.

Source: OASIS, Static Analysis Results Interchange Format 2.1.0, 2020, sections 3.13 to 3.49.
"""

from pathlib import Path

from .. import __version__
from .catalogue import RULES
from .findings import Diagnosis, ScriptFinding, Severity

_LEVELS = {Severity.BUG: "error", Severity.COST: "warning", Severity.NOTE: "note"}


def to_sarif(diagnosis: Diagnosis) -> dict[str, object]:
    """Return a SARIF log with one run of the doctor over one script."""
    used = sorted({finding.rule for finding in diagnosis.findings})
    driver = {
        "name": "paceline doctor",
        "version": __version__,
        "rules": [_rule(name) for name in used],
    }
    results = [
        _result(diagnosis.script, finding, used.index(finding.rule))
        for finding in diagnosis.findings
    ]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}
        ],
    }


def _rule(name: str) -> dict[str, object]:
    rule = RULES.get(name)
    if rule is None:
        return {"id": name, "shortDescription": {"text": "The script does not parse"}}
    return {
        "id": name,
        "shortDescription": {"text": rule.what},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.fix} Source: {rule.source}"},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(script: str, finding: ScriptFinding, rule_index: int) -> dict[str, object]:
    location = {
        "artifactLocation": {"uri": Path(script).as_posix()},
        "region": {"startLine": finding.line, "startColumn": finding.column},
    }
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.what}. {finding.why} Fix: {finding.fix}"},
        "locations": [{"physicalLocation": location}],
    }
