"""Findings as SARIF 2.1.0, which code hosts show beside the lines.

Source: OASIS, Static Analysis Results Interchange Format 2.1.0, 2020, sections 3.13 to 3.49.
"""

from pathlib import Path

from .. import __version__
from .catalogue import RULES
from .findings import Diagnosis, ScriptFinding, Severity

_LEVELS = {Severity.BUG: "error", Severity.COST: "warning", Severity.NOTE: "note"}


def to_sarif(found: Diagnosis) -> dict[str, object]:
    """One run of one tool over one script."""
    used = sorted({one.rule for one in found.findings})
    driver = {
        "name": "paceline doctor",
        "version": __version__,
        "rules": [_rule(name) for name in used],
    }
    results = [_result(found.script, one, used.index(one.rule)) for one in found.findings]
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


def _result(script: str, one: ScriptFinding, place: int) -> dict[str, object]:
    where = {
        "artifactLocation": {"uri": Path(script).as_posix()},
        "region": {"startLine": one.line, "startColumn": one.column},
    }
    return {
        "ruleId": one.rule,
        "ruleIndex": place,
        "level": _LEVELS[one.severity],
        "message": {"text": f"{one.what}. {one.why} Fix: {one.fix}"},
        "locations": [{"physicalLocation": where}],
    }
