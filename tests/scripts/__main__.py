"""Runs every script in every configuration and writes docs/scripts.md: ``make scripts``.

    python -m scripts               all of them, and the page
    python -m scripts NAME ...      these; nothing is written

Exits with 1 where a cell differs.
"""

import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from . import FAMILIES, SCRIPTS
from .base import CONFIGURATIONS, Script
from .harness import DIFFERS, REFUSED, RIGHT, Cell
from .rows import begin_process, row_of

ROOT = Path(__file__).parents[2]
PROCESSES = 2
"""Number of scripts that run at once: few, since each starts workers of its own."""
PAGE = ROOT / "docs" / "scripts.md"

HEAD = """\
# Small scripts of every kind

Made by `make scripts` at {commit}, torch {torch}, on {processors} cores. A script trains a network
of a few hundred parameters in float64 for three epochs. Each is run by itself under plain `python`
and by several workers, and compared with the same text without Paceline: by itself to the last
bit; under full-sync to 1e-9, or with the inline engine where a part of a batch is not what one
process would see (dropout, augmentation, batch norm). Under the other protocols it must hold what
holds under any: each sample once an epoch, equal parameters in all workers between epochs,
evaluation and schedules exact, a loss that falls.

{counts}

`=` is right, `refused` with the sentence below, `DIFFERS` is a fault. The texts are in
[tests/scripts](../tests/scripts). Of averaged models and of rates that are set by hand in each step
`=` says less where workers do not step together: the model is right, and each worker counts its own
steps, which [loops.md](loops.md) has more of.

"""


def run_all(scripts: Sequence[Script]) -> Iterator[tuple[Script, list[Cell]]]:
    """Run each script in every configuration and report it line by line."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, context, begin_process) as pool:
        results = pool.map(row_of, [one.name for one in scripts])
        for number, (script, (row, took_s)) in enumerate(zip(scripts, results, strict=True), 1):
            words = "  ".join(f"{one.verdict:8}" for one in row)
            print(f"{number:4} {script.name:32} {words} {took_s:5.1f} s", flush=True)
            for one, configuration in zip(row, CONFIGURATIONS, strict=True):
                if one.verdict == DIFFERS:
                    print(f"     {configuration.name}: {one.words}", flush=True)
            yield script, row


def page(rows: dict[str, list[Cell]]) -> str:
    """docs/scripts.md."""
    notes: dict[str, int] = {}
    lines: list[str] = []
    for family, scripts in FAMILIES.items():
        lines += [f"## {family}", "", *table(scripts, rows, notes), ""]
    lines += ["## What is refused", ""]
    root = f"{Path(__file__).parents[2]}/"
    lines += [f"{number}. {words}".replace(root, "") for words, number in notes.items()]
    return HEAD.format(**about(rows)) + "\n".join(lines) + "\n"


def table(
    scripts: Sequence[Script], rows: dict[str, list[Cell]], notes: dict[str, int]
) -> list[str]:
    """The scripts of a family, one row each."""
    names = " | ".join(one.name for one in CONFIGURATIONS)
    lines = [f"| script | what it does | {names} |", "|---" * (2 + len(CONFIGURATIONS)) + "|"]
    for script in scripts:
        cells = " | ".join(written(one, notes) for one in rows[script.name])
        lines.append(f"| `{script.name}` | {script.summary} | {cells} |")
    return lines


def written(one: Cell, notes: dict[str, int]) -> str:
    """A cell, with the number of its sentence if it was refused."""
    if one.verdict != REFUSED:
        return one.verdict
    return f"refused [{notes.setdefault(one.words, len(notes) + 1)}]"


def about(rows: dict[str, list[Cell]]) -> dict[str, str]:
    """Where the page was made, and the counts of cells by verdict."""
    counts = Counter(one.verdict for row in rows.values() for one in row)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    total = f"{len(rows)} scripts in {len(CONFIGURATIONS)} configurations: {counts[RIGHT]} right, "
    return {
        "commit": commit or "no commit",
        "torch": torch.__version__,
        "processors": str(os.cpu_count()),
        "counts": total + f"{counts[REFUSED]} refused by name, {counts[DIFFERS]} different.",
    }


def main() -> int:
    names = sys.argv[1:]
    chosen = [one for one in SCRIPTS if not names or one.name in names]
    rows = {script.name: row for script, row in run_all(chosen)}
    if not names:
        PAGE.write_text(page(rows))
    print(about(rows)["counts"])
    return any(one.verdict == DIFFERS for row in rows.values() for one in row)


if __name__ == "__main__":
    sys.exit(main())
