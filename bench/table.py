"""Tables of measured figures, with the machine, the command and the spread."""

import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent.parent / "results"


def say(line: str) -> None:
    """How far it is."""
    print(line, file=sys.stderr, flush=True)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, with the least and the most."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def interval(values: Sequence[float], num_draws: int = 2000) -> tuple[float, float, float]:
    """Median, and its 95 % interval by bootstrap (seeded)."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(num_draws)
    )
    return statistics.median(values), medians[num_draws // 40], medians[-1 - num_draws // 40]


_PARTS = ("--only", "--quick", "--tasks", "--models", "--formats")


def machine() -> str:
    """The machine and the commit, in words that say nothing of where it stands.

    Asked for before the measuring, so what cannot become a page is refused here: one page is one
    whole run, at one commit.
    """
    commit = _commit()
    if "--write" in sys.argv:
        if part := next((one for one in _PARTS if one in sys.argv), None):
            sys.exit(f"{part} with --write: a page is one whole run; leave one of them out")
        if commit.endswith("+"):
            sys.exit("--write: something is not committed, and a page names its commit")
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        pass
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores of {name}, {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, commit {commit}, "
        f"load before the table {load:.1f}"
    )


def _commit() -> str:
    """Of the code that is measured; with a "+" where it has been changed since."""
    words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(words, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write_table(
    name: str, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str
) -> None:
    """Write ``results/NAME.md``."""
    RESULTS.mkdir(exist_ok=True)
    write_rows(RESULTS / f"{name}.md", title, header, rows, note)


def write_rows(
    path: Path, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str
) -> None:
    """Write one page: title, command, table, note; a folder of this machine has no name in it."""
    words = ["FOLDER" if Path(one).is_absolute() else one for one in sys.argv]
    lines = [f"# {title}", "", f"`{' '.join(['python', *words])}`", ""]
    lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    path.write_text("\n".join([*lines, "", note, ""]))
