"""How often the doctor's rules are right, on scripts that were labelled by hand.

    python bench/doctor.py [--write]

Each script of tests/doctor/corpus carries a label, ``# <- rule``, at the line of each mistake;
labels are cut out before the script is read. A finding on a labelled line with the labelled rule is
right, any other is wrong, and a label without a finding is missed. Notes on tensor cores are not
labelled and not counted. Writes results/doctor-static.md.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

from paceline.doctor.catalogue import RULES
from paceline.doctor.examine import diagnose
from paceline.doctor.findings import Severity
from table import machine, write_table

CORPUS = Path(__file__).parent.parent / "tests" / "doctor" / "corpus"
LABEL = re.compile(r"  # <- ([\w-]+(?:, [\w-]+)*)$", re.MULTILINE)


def labels(text: str) -> set[tuple[int, str]]:
    """Line and rule of each mistake."""
    return {
        (number, name)
        for number, row in enumerate(text.splitlines(), 1)
        for found in LABEL.finditer(row)
        for name in found[1].split(", ")
    }


def judge(path: Path) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
    """What is labelled in a script, and what is found."""
    text = path.read_text()
    found = diagnose(LABEL.sub("", text), path.name).findings
    counted = {(one.line, one.rule) for one in found if one.severity is not Severity.NOTE}
    return labels(text), counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    right, wrong, missed = Counter[str](), Counter[str](), Counter[str]()
    scripts = sorted(CORPUS.glob("*.py"))
    for path in scripts:
        wanted, found = judge(path)
        right.update(name for _, name in wanted & found)
        wrong.update(name for _, name in found - wanted)
        missed.update(name for _, name in wanted - found)
    counts = {name: (right[name], wrong[name], missed[name]) for name in right | wrong | missed}
    rows = [row(name, *counts[name]) for name in (*RULES, *sorted(counts.keys() - RULES.keys()))
            if name in counts]  # fmt: skip
    rows.append(row("**all**", right.total(), wrong.total(), missed.total()))
    print(*map(" | ".join, rows), sep="\n")
    if asked.write:
        silent = [name for name, rule in RULES.items()
                  if name not in counts and rule.severity is not Severity.NOTE]  # fmt: skip
        note = (
            f"{len(scripts)} scripts, written and labelled by the rules' own author, so that they "
            "say more of what the rules miss than of how often they are wrong elsewhere. No label "
            f"in them, so tried on their own examples only: {', '.join(silent)}. {machine()}"
        )
        header = ("rule", "right", "wrong", "missed", "precision", "recall")
        write_table("doctor-static", "How often the doctor's rules are right", header, rows, note)


def row(name: str, right: int, wrong: int, missed: int) -> tuple[str, ...]:
    """One row; a dash where there is nothing to divide by."""
    shares = [f"{right / all_:.0%}" if (all_ := right + one) else "-" for one in (wrong, missed)]
    return name, str(right), str(wrong), str(missed), *shares


if __name__ == "__main__":
    main()
