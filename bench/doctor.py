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
CORPUS = TESTS / "corpus"
LABEL = re.compile(r"  # <- ([\w-]+(?:, [\w-]+)*)$", re.MULTILINE)
Place = tuple[int, str]
"""Line and rule."""


class Judged(NamedTuple):
    """A public script: its text's digest, and the verdict on each place."""

    path: str
    digest: str
    verdicts: dict[Place, str]


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
    print(*map(" | ".join, rows), sep="\n")
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
        "found, so the true one is lower. In neither, so tried on their own examples only: "
        f"{', '.join(silent)}. {where}"
    )
    kinds = ("right", "wrong", "missed", "precision", "recall")
    header = ("rule", *(f"corpus: {one}" for one in kinds), *(f"public: {one}" for one in kinds))
    write_table("doctor-static", "How often the doctor's rules are right", header, rows, note)


if __name__ == "__main__":
    main()
