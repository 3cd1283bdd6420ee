"""How often the doctor's rules are right, on labelled scripts and on unmodified public ones.

    python bench/doctor.py [--public FOLDER] [--write]

Each script of tests/doctor/corpus carries a label, ``# <- rule``, at the line of each mistake;
labels are cut out before the script is read. A finding on a labelled line with the labelled rule is
right, any other is wrong, and a label without a finding is missed. Notes on tensor cores are not
labelled and not counted.

tests/doctor/public.txt names scripts of public repositories by their path and the digest of their
text, and has a verdict on every finding in them, given by reading the script; what a reader saw and
no rule found stands there as missed. FOLDER holds the repositories as owner+name; a script that is
another than was judged, or a finding that was not judged, ends the run. Writes
results/doctor-static.md.

The scripts of tests/doctor/strangers were written, and labelled in words (``# wrong: ...``), by
somebody who had not read the rules. tests/doctor/strangers.txt has what the rules made of them at
first, before any was mended by them: line of the label, rule that is for it (- none), found or
missed, and the line of the finding where it is another; at the end what was found without a label
(overlooked by the labels, wrong, or later: true, and found only since).

tests/doctor/drawn is a second set, in the same form (drawn.txt), by the author of the newer rules:
which faults its scripts have was drawn by lot from faults.txt, which was put down before these
rules were, and the scripts were labelled before any rule was tried on them.
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


class Judged(NamedTuple):
    """A public script: its text's digest, and the verdict on each place."""

    path: str
    digest: str
    verdicts: dict[Place, str]


class Labelled(NamedTuple):
    """A label of a stranger, or a finding without one.

    Attributes:
        line: of the label, or of the finding where nobody labelled it.
        rule: empty: none is for it.
        first: what it was at first: found, missed, overlooked by the labels, or wrong.
        place: where the rule speaks of it.
    """

    line: int
    rule: str
    first: str
    place: Place


class Tally:
    """Right, wrong and missed, by rule."""

    def __init__(self) -> None:
        self.right, self.wrong, self.missed = Counter[str](), Counter[str](), Counter[str]()

    def add(self, wanted: set[Place], found: set[Place]) -> None:
        self.right.update(name for _, name in wanted & found)
        self.wrong.update(name for _, name in found - wanted)
        self.missed.update(name for _, name in wanted - found)

    @property
    def names(self) -> set[str]:
        return {*self.right, *self.wrong, *self.missed}

    def row(self, name: str = "") -> tuple[str, ...]:
        """Of a rule, or of all: counts, precision, recall; a dash where there is nothing."""
        right, wrong, missed = (
            one[name] if name else one.total() for one in (self.right, self.wrong, self.missed)
        )
        if not right + wrong + missed:
            return ("-",) * 5
        shares = [f"{right / of:.0%}" if (of := right + one) else "-" for one in (wrong, missed)]
        return str(right), str(wrong), str(missed), *shares


def labels(text: str) -> set[Place]:
    """Line and rule of each mistake."""
    return {
        (number, name)
        for number, row in enumerate(text.splitlines(), 1)
        for found in LABEL.finditer(row)
        for name in found[1].split(", ")
    }


def found_in(text: str, name: str) -> set[Place]:
    """What is found, notes left out."""
    found = diagnose(text, name).findings
    return {(one.line, one.rule) for one in found if one.severity is not Severity.NOTE}


def judge(path: Path) -> tuple[set[Place], set[Place]]:
    """What is labelled in a script, and what is found."""
    text = path.read_text()
    return labels(text), found_in(LABEL.sub("", text), path.name)


def judged() -> Iterator[Judged]:
    """The public scripts, as tests/doctor/public.txt has them."""
    for block in re.split(r"\n(?=\S)", (TESTS / "public.txt").read_text().strip()):
        head, *rows = block.splitlines()
        path, _, digest = head.rpartition(" ")
        words = [row.split() for row in rows]
        yield Judged(path, digest, {(int(line), rule): said for line, rule, said in words})


def by_strangers(folder: Path = STRANGERS) -> dict[Path, list[Labelled]]:
    """The scripts of a set, as the list beside its folder has them; right ones with nothing."""
    found: dict[Path, list[Labelled]] = {path: [] for path in sorted(folder.glob("*.py"))}
    for block in re.split(r"\n(?=\S)", folder.with_suffix(".txt").read_text().strip()):
        name, *rows = block.splitlines()
        for line, rule, first, *at in (row.split() for row in rows):
            rule = rule.strip("-") and rule
            place = (int(at[0] if at else line), rule)
            found[folder / name].append(Labelled(int(line), rule, first, place))
    return found


def found_in_stranger(path: Path) -> set[Place]:
    """What is found without its labels."""
    return found_in(WORDS.sub("", path.read_text()), path.name)


class Tried(NamedTuple):
    """What the rules made of a set at first, and what they do now.

    Attributes:
        first: how many faults and findings were what, at first.
        num_faults, num_without_rule: labelled; of these, for how many there is no rule.
        num_now, num_wrong: faults found now, and findings that are not true.
    """

    first: Counter[str]
    num_faults: int
    num_without_rule: int
    num_now: int
    num_wrong: int

    @property
    def at_first(self) -> str:
        """Recall and precision before any rule was mended by the set."""
        count = self.first
        num_findings = count["found"] + count["overlooked"] + count["wrong"]
        return (
            f"At first the rules found {count['found']} of {self.num_faults} faults (recall "
            f"{count['found'] / self.num_faults:.0%}); of {num_findings} findings "
            f"{count['found']} were labelled (precision {count['found'] / num_findings:.0%}), "
            f"{count['overlooked']} true and overlooked by the labels, {count['wrong']} wrong."
        )


def tried_on(folder: Path) -> Tried:
    """What the rules made, and make, of a set."""
    scripts = by_strangers(folder)
    counts = Counter(one.first for rows in scripts.values() for one in rows)
    faults = [
        (path, one) for path, rows in scripts.items() for one in rows if one.first in FAULTS
    ]  # fmt: skip
    now = {path: found_in_stranger(path) for path in scripts}
    known = {path: {one.place for one in rows if one.first != "wrong"}
             for path, rows in scripts.items()}  # fmt: skip
    return Tried(
        counts, len(faults), sum(not one.rule for _, one in faults),
        sum(one.place in now[path] for path, one in faults),
        sum(len(now[path] - known[path]) for path in scripts),
    )  # fmt: skip


def of_strangers() -> str:
    """What the rules made of the strangers' scripts at first, and what they do now."""
    one = tried_on(STRANGERS)
    return (
        f"Strangers: {len(by_strangers())} scripts of somebody who had not read the rules, "
        f"labelled before the rules were tried on them. {one.at_first} Rules were mended, and "
        "written, by these scripts since, so that what they find now says less: "
        f"{one.num_now} of {one.num_faults}, {one.num_wrong} wrong; for {one.num_without_rule} of "
        "the faults there is no rule."
    )


def of_drawn() -> str:
    """The same of the second set."""
    one = tried_on(DRAWN)
    rows = (DRAWN / "faults.txt").read_text().splitlines()
    num_listed = sum(row[:1].isdigit() for row in rows)
    return (
        f"Drawn: {len(by_strangers(DRAWN))} more scripts, with {one.num_faults} faults drawn by "
        f"lot from {num_listed} that were put down before the newer rules were written; the "
        "scripts were labelled before any rule was tried on them, but their author had written "
        f"the newer rules, and no stranger. {one.at_first} For {one.num_without_rule} of the "
        f"faults there is no rule. Now: {one.num_now} of {one.num_faults}, {one.num_wrong} wrong."
    )


def in_public(folder: Path, script: Judged) -> tuple[set[Place], set[Place]]:
    """What a reader holds for mistakes in a public script, and what is found."""
    raw = (folder / script.path).read_bytes()
    if hashlib.sha256(raw).hexdigest()[:12] != script.digest:
        sys.exit(f"{script.path} is another text than was judged")
    found = found_in(raw.decode(), script.path)
    unjudged = sorted(found - script.verdicts.keys())
    if unjudged:
        sys.exit(f"{script.path}: no verdict on {unjudged}")
    return {place for place, said in script.verdicts.items() if said != "wrong"}, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--public", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.write and asked.public is None:
        sys.exit("--write wants --public FOLDER: the page has both")
    where = machine()
    corpus, public = Tally(), Tally()
    scripts = sorted(CORPUS.glob("*.py"))
    for path in scripts:
        corpus.add(*judge(path))
    others = list(judged()) if asked.public else []
    for one in others:
        public.add(*in_public(asked.public, one))
    names = [name for name in (*RULES, "syntax") if name in corpus.names | public.names]
    rows = [(name, *corpus.row(name), *public.row(name)) for name in names]
    rows.append(("**all**", *corpus.row(), *public.row()))
    print(*map(" | ".join, rows), of_strangers(), of_drawn(), sep="\n")
    if asked.write:
        write(rows, names, len(scripts), others, where)


def write(
    rows: list[tuple[str, ...]], names: list[str], num_scripts: int, others: list[Judged],
    where: str,
) -> None:  # fmt: skip
    silent = [
        name for name, rule in RULES.items()
        if name not in names and rule.severity is not Severity.NOTE
    ]  # fmt: skip
    repositories = sorted({one.path.partition("/")[0].replace("+", "/") for one in others})
    note = (
        f"Corpus: {num_scripts} scripts, written and labelled by the rules' own author, so that "
        "they say more of what the rules miss than of how often they are wrong elsewhere. Public: "
        f"{len(others)} unmodified scripts of {', '.join(repositories)}; every finding was judged "
        "by reading the script. Their recall counts only what a reader happened to see and no rule "
        f"found, so the true one is lower. {of_strangers()} {of_drawn()} In neither "
        "corpus nor public, so tried on their own examples, and some on strangers' scripts: "
        f"{', '.join(silent)}. {where}"
    )
    kinds = ("right", "wrong", "missed", "precision", "recall")
    header = ("rule", *(f"corpus: {one}" for one in kinds), *(f"public: {one}" for one in kinds))
    write_table("doctor-static", "How often the doctor's rules are right", header, rows, note)


if __name__ == "__main__":
    main()
