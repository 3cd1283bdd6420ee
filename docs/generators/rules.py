"""docs/rules.md: a section for each rule of the doctor, with two of its examples."""

import importlib
import inspect

from paceline.doctor.catalogue import GROUPS
from paceline.doctor.rule import ScriptRule

from .parts import indented

HEAD = """\
# The rules of the doctor

Made from the docstrings in `src/paceline/doctor/` by `docs/generate.py`; edit those. What the
command does with them: [doctor.md](doctor.md).

Each rule's sick and healthy examples are its tests. No rule has a figure: the effect of a finding
depends on the model and the machine, and reading a script measures neither.
"""


SAY = {"bug": "a bug", "cost": "could cost, not measured", "note": "a note"}


def page() -> str:
    """Return docs/rules.md."""
    parts = [HEAD]
    for group, rules in GROUPS.items():
        module = importlib.import_module(f"paceline.doctor.{group}")
        title = (inspect.getdoc(module) or "").partition("\n")[0].rstrip(".")
        parts.append(f"## {title}\n")
        parts += [section(rule) for rule in rules]
    return "\n".join(parts)


def section(rule: ScriptRule) -> str:
    """Return the section of one rule, with its first sick and its first healthy example."""
    path = f"doctor/{rule.group}/{rule.name.replace('-', '_')}.py"
    lines = [
        f"### {rule.name}", "",
        f"{rule.what}. ({SAY[rule.severity.value]}; [`{path}`](../src/paceline/{path}))", "",
        rule.why, "", f"Fix: {rule.fix}", "", f"Source: {rule.source}", "", "Sick:", "",
        *indented(rule.sick[0].strip("\n")), "", "Healthy:", "",
        *indented(rule.healthy[0].strip("\n")), "",
    ]  # fmt: skip
    return "\n".join(lines)
