"""Other benches at two commits, in turn: the effect of a change on their speed.

    python bench/between.py BEFORE [--rounds 3] [--only NAME ...] [--write]

Both commits are checked out and run by the same interpreter. A round is: before, after, after
again, of one bench; then the next round. A row is a row that the bench itself prints at both
commits, represented by its first figure. The ratio of a round is after to before; "again" is the
second run of after to its first, which shows how far equal figures differ on this machine. A row is
slower if its ratio is on the worse side of 1 in every round, by more than "again" deviates in any.
Writes results/between.md.
"""

import argparse
import compileall
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from table import machine, spread, write_table

ROOT = Path(__file__).resolve().parent.parent
BENCHES = {
    "pushes": ("--quick",),
    "startup": ("--quick",),
    "simulator": ("--quick", "--only", "speed"),
    "overhead": ("--quick",),
    "kvstore": ("--pairs", "2"),
    "stragglers": ("--pairs", "1"),
    "limit": ("--blocks", "1", "--only", "mlp"),
}
MORE_IS_BETTER = ("simulator", "pushes", "kvstore")
_FIGURE = re.compile(r"-?[\d,]+(\.\d+)?( \(.* to .*\))?")


@dataclass(slots=True)
class Row:
    """One row of one bench, with its figure in each run."""

    bench: str
    name: str
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [b / a for a, b in zip(self.before, self.after, strict=True)]

    @property
    def verdict(self) -> str:
        """Whether every round agrees, by more than the machine's own variation."""
        slowdowns = [1 / r for r in self.ratios] if self.bench in MORE_IS_BETTER else self.ratios
        aa_ratios = [b / a for a, b in zip(self.after, self.again, strict=True)]
        margin = max(max(ratio, 1 / ratio) for ratio in aa_ratios)
        if min(slowdowns) > margin:
            return "slower"
        return "faster" if max(slowdowns) < 1 / margin else "as before"

    def cells(self) -> list[str]:
        aa_ratios = [b / a for a, b in zip(self.after, self.again, strict=True)]
        figures = [f"{statistics.median(values):,.4g}" for values in (self.before, self.after)]
        return [
            self.bench,
            self.name,
            *figures,
            spread(self.ratios),
            spread(aa_ratios),
            self.verdict,
        ]


def check_out(commit: str, folder: Path) -> Path:
    """Check out this repository at a commit, with its modules compiled."""
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, folder], check=True)
    subprocess.run(["git", "checkout", "--quiet", commit], cwd=folder, check=True)
    compileall.compile_dir(folder / "src", quiet=2)
    return folder


def run_bench(root: Path, bench: str) -> dict[str, float]:
    """Run a bench of a checkout; return the first figure of each row, by the cells before it."""
    path = os.pathsep.join(str(root / folder) for folder in ("src", "tests/support"))
    result = subprocess.run(
        [sys.executable, f"bench/{bench}.py", *BENCHES[bench]],
        cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    figures: dict[str, float] = {}
    for line in result.stdout.splitlines():
        name, figure = _parse_row(line.split(" | "))
        if figure is not None:
            figures[name] = figure
    if not figures:
        sys.exit(
            f"{bench} at {root.name} printed no figures:\n{result.stdout}{result.stderr}"[-2000:]
        )
    return figures


def _parse_row(cells: Sequence[str]) -> tuple[str, float | None]:
    """Return the name of a row and its figure: one with a spread, or else the first number."""
    numbers = [i for i, cell in enumerate(cells) if i and _FIGURE.fullmatch(cell.strip())]
    first = next((i for i in numbers if "(" in cells[i]), numbers[0] if numbers else 0)
    if not first:
        return "", None
    return " | ".join(cells[:first]), float(cells[first].split()[0].replace(",", ""))


def compare(before: Path, after: Path, bench: str, rounds: int) -> list[Row]:
    """Return the rows of one bench that both commits print."""
    rows: dict[str, Row] = {}
    for number in range(rounds):
        runs = [run_bench(root, bench) for root in (before, after, after)]
        common_names = runs[0].keys() & runs[1].keys() & runs[2].keys()
        for name in (name for name in runs[1] if name in common_names):
            row = rows.setdefault(name, Row(bench, name))
            for figures, run in zip((row.before, row.after, row.again), runs, strict=True):
                figures.append(run[name])
        print(f"{bench}: round {number + 1} of {rounds}", flush=True)
    return [row for row in rows.values() if len(row.before) == rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(BENCHES), choices=list(BENCHES))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, rows = machine(), []
    with tempfile.TemporaryDirectory() as scratch:
        before = check_out(options.before, Path(scratch) / "before")
        after = check_out("HEAD", Path(scratch) / "after")
        for bench in options.only:
            bench_rows = compare(before, after, bench, options.rounds)
            rows += [row.cells() for row in bench_rows]
            for row in bench_rows:
                print(" | ".join(row.cells()), flush=True)
    if options.write:
        header = ["bench", "row", "before", "after", "after : before", "again : after", "verdict"]
        method = (
            f"Before: {options.before}. {options.rounds} rounds of before, after, after again; "
            "medians, ratios with least and most. More is better in "
            f"{', '.join(MORE_IS_BETTER)}, less in the others. {note}"
        )
        write_table("between", "Two commits in turn", header, rows, method)


if __name__ == "__main__":
    main()
