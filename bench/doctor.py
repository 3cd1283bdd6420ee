"""Precision and recall of the doctor's rules, on labelled scripts and on unmodified public ones.

    python bench/doctor.py [--public FOLDER] [--write]

Each script of tests/doctor/corpus carries a label, ``# <- rule``, at the line of each mistake;
labels are removed before the script is examined. A finding on a labelled line with the labelled
rule is right, any other is wrong, and a label without a finding is missed. Notes on tensor cores
are not labelled and not counted.

tests/doctor/public.txt names scripts of public repositories by their path and the digest of their
text, and has a verdict on every finding in them, given by reading the script; mistakes that a
reader saw and no rule found are listed as missed. FOLDER holds the repositories as owner+name; a
script with another text, or a finding without a verdict, ends the run. Writes
results/doctor-static.md.

The scripts of tests/doctor/strangers were written, and labelled in words (``# wrong: ...``), by
somebody who had not read the rules. tests/doctor/strangers.txt records the first result of the
rules, before any was changed by them: line of the label, rule for it (- none), found or missed,
and the line of the finding if it differs; at the end findings without a label (overlooked by the
labels, wrong, or later: true, and found only since).

tests/doctor/drawn is a second set, in the same form (drawn.txt), by the author of the newer rules:
the faults of its scripts were drawn by lot from faults.txt, which was written before these rules,
and the scripts were labelled before any rule was tried on them.
"""

import argparse
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.doctor.catalogue import RULES
from paceline.doctor.examine import diagnose
from paceline.doctor.findings import Severity
from table import machine, write_table

TESTS = Path(__file__).parent.parent / "tests" / "doctor"
CORPUS, STRANGERS, DRAWN = TESTS / "corpus", TESTS / "strangers", TESTS / "drawn"
LABEL = re.compile(r"  # <- ([\w-]+(?:, [\w-]+)*)$", re.MULTILINE)
WORDS = re.compile(r"  # wrong: .*$", re.MULTILINE)
FAULTS = ("found", "missed")
Place = tuple[int, str]
"""Line and rule."""


class PublicScript(NamedTuple):
    """A public script, the digest of its text, and the verdict on each place."""

    path: str
    digest: str
    verdicts: dict[Place, str]


class Labelled(NamedTuple):
    """A label of a stranger, or a finding without one.

    Attributes:
        line: of the label, or of an unlabelled finding.
        rule: the rule for it; empty if there is none.
        first: the first result: found, missed, overlooked by the labels, or wrong.
        place: where the rule reports it.
    """

    line: int
    rule: str
    first: str
    place: Place


class Tally:
    """Counts of right, wrong and missed, by rule."""

    def __init__(self) -> None:
        self.right, self.wrong, self.missed = Counter[str](), Counter[str](), Counter[str]()

    def add(self, expected: set[Place], actual: set[Place]) -> None:
        self.right.update(name for _, name in expected & actual)
        self.wrong.update(name for _, name in actual - expected)
        self.missed.update(name for _, name in expected - actual)

    @property
    def names(self) -> set[str]:
        return {*self.right, *self.wrong, *self.missed}

    def row(self, name: str = "") -> tuple[str, ...]:
        """Return counts, precision and recall of a rule, or of all; dashes if there are none."""
        right, wrong, missed = (
            counter[name] if name else counter.total()
            for counter in (self.right, self.wrong, self.missed)
        )
        if not right + wrong + missed:
            return ("-",) * 5
        shares = [
            f"{right / total:.0%}" if (total := right + other) else "-" for other in (wrong, missed)
        ]
        return str(right), str(wrong), str(missed), *shares


def labels(text: str) -> set[Place]:
    """Return the line and rule of each labelled mistake."""
    return {
        (number, name)
        for number, row in enumerate(text.splitlines(), 1)
        for match in LABEL.finditer(row)
        for name in match[1].split(", ")
    }


def find(text: str, name: str) -> set[Place]:
    """Return the places of all findings except notes."""
    findings = diagnose(text, name).findings
    return {
        (finding.line, finding.rule)
        for finding in findings
        if finding.severity is not Severity.NOTE
    }


def judge(path: Path) -> tuple[set[Place], set[Place]]:
    """Return the labelled places of a script, and those found."""
    text = path.read_text()
    return labels(text), find(LABEL.sub("", text), path.name)


def read_public() -> Iterator[PublicScript]:
    """Read the public scripts and their verdicts from tests/doctor/public.txt."""
    for block in re.split(r"\n(?=\S)", (TESTS / "public.txt").read_text().strip()):
        head, *rows = block.splitlines()
        path, _, digest = head.rpartition(" ")
        words = [row.split() for row in rows]
        yield PublicScript(
            path, digest, {(int(line), rule): verdict for line, rule, verdict in words}
        )


def by_strangers(folder: Path = STRANGERS) -> dict[Path, list[Labelled]]:
    """Read the labels of each script of a set from the list beside its folder."""
    labels_by_path: dict[Path, list[Labelled]] = {path: [] for path in sorted(folder.glob("*.py"))}
    for block in re.split(r"\n(?=\S)", folder.with_suffix(".txt").read_text().strip()):
        name, *rows = block.splitlines()
        for line, rule, first, *finding_line in (row.split() for row in rows):
            rule = rule.strip("-") and rule
            place = (int(finding_line[0] if finding_line else line), rule)
            labels_by_path[folder / name].append(Labelled(int(line), rule, first, place))
    return labels_by_path


def found_in_stranger(path: Path) -> set[Place]:
    """Return the findings in a stranger's script without its labels."""
    return find(WORDS.sub("", path.read_text()), path.name)


class SetResult(NamedTuple):
    """The first and the present results of the rules on a set.

    Attributes:
        first: numbers of faults and findings by their first result.
        num_faults, num_without_rule: labelled faults, and those of them without a rule.
        num_now, num_wrong: faults found now, and false findings.
    """

    first: Counter[str]
    num_faults: int
    num_without_rule: int
    num_now: int
    num_wrong: int

    @property
    def at_first(self) -> str:
        """Recall and precision before any rule was changed by the set."""
        count = self.first
        num_findings = count["found"] + count["overlooked"] + count["wrong"]
        return (
            f"At first the rules found {count['found']} of {self.num_faults} faults (recall "
            f"{count['found'] / self.num_faults:.0%}); of {num_findings} findings "
            f"{count['found']} were labelled (precision {count['found'] / num_findings:.0%}), "
            f"{count['overlooked']} true and overlooked by the labels, {count['wrong']} wrong."
        )


def evaluate(folder: Path) -> SetResult:
    """Evaluate the rules on a set."""
    scripts = by_strangers(folder)
    counts = Counter(row.first for rows in scripts.values() for row in rows)
    faults = [
        (path, row) for path, rows in scripts.items() for row in rows if row.first in FAULTS
    ]  # fmt: skip
    findings = {path: found_in_stranger(path) for path in scripts}
    true_places = {path: {row.place for row in rows if row.first != "wrong"}
                   for path, rows in scripts.items()}  # fmt: skip
    return SetResult(
        counts, len(faults), sum(not row.rule for _, row in faults),
        sum(row.place in findings[path] for path, row in faults),
        sum(len(findings[path] - true_places[path]) for path in scripts),
    )  # fmt: skip


def describe_strangers() -> str:
    """Describe the first and the present results on the strangers' scripts."""
    result = evaluate(STRANGERS)
    return (
        f"Strangers: {len(by_strangers())} scripts of somebody who had not read the rules, "
        f"labelled before the rules were tried on them. {result.at_first} Rules were mended, and "
        "written, by these scripts since, so that what they find now says less: "
        f"{result.num_now} of {result.num_faults}, {result.num_wrong} wrong; for "
        f"{result.num_without_rule} of the faults there is no rule."
    )


def describe_drawn() -> str:
    """Describe the same for the second set."""
    result = evaluate(DRAWN)
    rows = (DRAWN / "faults.txt").read_text().splitlines()
    num_listed = sum(row[:1].isdigit() for row in rows)
    return (
        f"Drawn: {len(by_strangers(DRAWN))} more scripts, with {result.num_faults} faults drawn by "
        f"lot from {num_listed} that were put down before the newer rules were written; the "
        "scripts were labelled before any rule was tried on them, but their author had written "
        f"the newer rules, and no stranger. {result.at_first} For {result.num_without_rule} of the "
        f"faults there is no rule. Now: {result.num_now} of {result.num_faults}, "
        f"{result.num_wrong} wrong."
    )


def judge_public(folder: Path, script: PublicScript) -> tuple[set[Place], set[Place]]:
    """Return the mistakes of a public script by its reader, and those found."""
    source = (folder / script.path).read_bytes()
    if hashlib.sha256(source).hexdigest()[:12] != script.digest:
        sys.exit(f"{script.path} is another text than was judged")
    actual = find(source.decode(), script.path)
    unjudged = sorted(actual - script.verdicts.keys())
    if unjudged:
        sys.exit(f"{script.path}: no verdict on {unjudged}")
    return {place for place, verdict in script.verdicts.items() if verdict != "wrong"}, actual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--public", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write and options.public is None:
        sys.exit("--write wants --public FOLDER: the page has both")
    machine_note = machine()
    corpus, public = Tally(), Tally()
    scripts = sorted(CORPUS.glob("*.py"))
    for path in scripts:
        corpus.add(*judge(path))
    public_scripts = list(read_public()) if options.public else []
    for script in public_scripts:
        public.add(*judge_public(options.public, script))
    names = [name for name in (*RULES, "syntax") if name in corpus.names | public.names]
    rows = [(name, *corpus.row(name), *public.row(name)) for name in names]
    rows.append(("**all**", *corpus.row(), *public.row()))
    print(*map(" | ".join, rows), describe_strangers(), describe_drawn(), sep="\n")
    if options.write:
        write(rows, names, len(scripts), public_scripts, machine_note)


def write(
    rows: list[tuple[str, ...]], names: list[str], num_scripts: int,
    public_scripts: list[PublicScript], machine_note: str,
) -> None:  # fmt: skip
    silent = [
        name for name, rule in RULES.items()
        if name not in names and rule.severity is not Severity.NOTE
    ]  # fmt: skip
    repositories = sorted(
        {script.path.partition("/")[0].replace("+", "/") for script in public_scripts}
    )
    note = (
        f"Corpus: {num_scripts} scripts, written and labelled by the rules' own author, so that "
        "they say more of what the rules miss than of how often they are wrong elsewhere. Public: "
        f"{len(public_scripts)} unmodified scripts of {', '.join(repositories)}; every finding was "
        "judged by reading the script. Their recall counts only what a reader happened to see and "
        f"no rule found, so the true one is lower. {describe_strangers()} {describe_drawn()} In "
        "neither corpus nor public, so tried on their own examples, and some on strangers' "
        f"scripts: {', '.join(silent)}. {machine_note}"
    )
    kinds = ("right", "wrong", "missed", "precision", "recall")
    header = (
        "rule",
        *(f"corpus: {label}" for label in kinds),
        *(f"public: {label}" for label in kinds),
    )
    write_table("doctor-static", "How often the doctor's rules are right", header, rows, note)


if __name__ == "__main__":
    main()
