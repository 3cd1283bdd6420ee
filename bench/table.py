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
    """Print a line of progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the median, the minimum and the maximum."""
    median = statistics.median(values)
    return f"{median:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def interval(values: Sequence[float], num_draws: int = 2000) -> tuple[float, float, float]:
    """Return the median and its 95 % interval by bootstrap (seeded)."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(num_draws)
    )
    return statistics.median(values), medians[num_draws // 40], medians[-1 - num_draws // 40]


_PARTIAL_FLAGS = ("--only", "--quick", "--tasks", "--models", "--formats")


def machine() -> str:
    """Describe the machine and the commit, without host names or paths.

    Called before the measurement, so that a run which cannot become a page is refused early: a
    page is one whole run, at one commit.
    """
    commit = _commit()
    if "--write" in sys.argv:
        if flag := next((option for option in _PARTIAL_FLAGS if option in sys.argv), None):
            sys.exit(f"{flag} with --write: a page is one whole run; leave one of them out")
        if commit.endswith("+"):
            sys.exit("--write: something is not committed, and a page names its commit")
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            processor = next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        pass
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores of {processor}, {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, commit {commit}, "
        f"load before the table {load:.1f}"
    )


def _commit() -> str:
    """Return the commit of the measured code, followed by "+" if it has been changed since."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    result = subprocess.run(
        command, cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def write_table(
    name: str, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str
) -> None:
    """Write ``results/NAME.md``."""
    RESULTS.mkdir(exist_ok=True)
    write_rows(RESULTS / f"{name}.md", title, header, rows, note)


def write_rows(
    path: Path, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str
) -> None:
    """Write one page: title, command, table, note; absolute paths become FOLDER."""
    arguments = ["FOLDER" if Path(argument).is_absolute() else argument for argument in sys.argv]
    lines = [f"# {title}", "", f"`{' '.join(['python', *arguments])}`", ""]
    lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    path.write_text("\n".join([*lines, "", note, ""]))
