"""Public scripts with the lines that `--check` prints, against the same scripts without them.

    python bench/public_scripts.py --all MIRRORS [--jobs N] --write
    python bench/public_scripts.py --all MIRRORS --only NAME

MIRRORS holds a bare git directory OWNER+NAME/repo of each repository in `bench/public.py`. A script
is taken from there as published, its lines are cut, and it is copied twice; one copy is patched
with the output of `paceline launch --check`. Then six runs follow, each in a copy of its own:

    plain, one         python SCRIPT, as published: equal to the last bit
    fixed, full-sync   in fixed order, without dropout and noise, batch norm on its running
                       statistics, float64: python SCRIPT against two workers
    k-batch-async:2, local-sgd:4   as published, two workers: to the end, equal parameters

After its last line a script saves the state of its optimizers (`bench/watched.py`). Writes the
newest section of results/public-scripts.md; older ones stay below it.
"""

import argparse
import difflib
import importlib.util
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from made_up import FILES
from public import ENTRIES, Entry, texts_of
from table import RESULTS, machine, say
from watched import BEGIN, END, FIRST, FIXED, FOLDER, PAIRED

LIMIT_S, TOLERANCE = 300, 1e-12
WORKERS = ["launch", "--workers", "2", "--protocol"]
REFUSAL = re.compile(r"^error: .*\bunder k-batch-async", re.MULTILINE)
FIGURE = re.compile(r"\d[\d.e+-]*|nan")
PAGE = RESULTS / "public-scripts.md"
OLDER = "## Older: "
HEADER = (
    "script", "commit", "added, changed", "one worker", "full-sync 2", "k-batch-async:2",
    "local-sgd:4", "remarks",
)  # fmt: skip


class ScriptResult(NamedTuple):
    """The exit code of a run, its output, and the state of its workers, one entry a worker."""

    code: int
    output: str
    states: list[dict[str, Any]]

    @property
    def is_done(self) -> bool:
        return self.code == 0 and bool(self.states)


class Row(NamedTuple):
    """The result of a script: lines added and changed, and four cells, or why there are none."""

    entry: Entry
    added: int = 0
    changed: int = 0
    cells: tuple[str, ...] = ()
    refused: str = ""
    missing: str = ""

    def is_different(self) -> bool:
        """Whether a run finished with a wrong result."""
        is_far = FIGURE.fullmatch(self.cells[1]) and not float(self.cells[1]) <= TOLERANCE
        return bool(is_far or re.search("DIFFERS|UNEQUAL", " ".join(self.cells)))

    def texts(self) -> list[str]:
        commit = self.entry.source[1][:7]
        lines = f"{self.added}, {self.changed}" if not self.refused else "refused"
        cells = self.cells or ("-",) * 4
        first_remarks = [self.entry.remark] if not self.refused else [f'"{self.refused}"']
        remarks = "; ".join(remark for remark in (*first_remarks, self.missing) if remark)
        return [self.entry.name, commit, lines, *cells, remarks.replace("|", "/")]


def run(
    entry: Entry, folder: Path, call: Sequence[str] = (), *, is_fixed: bool = False
) -> ScriptResult:
    """Run a script in a copy of ``folder``: by paceline, or by python if ``call`` is empty."""
    path = entry.main or entry.script
    is_paired = is_fixed and entry.is_paired and not call
    with tempfile.TemporaryDirectory() as saved:
        run_dir = Path(saved) / "run"
        shutil.copytree(folder, run_dir)
        paths = [str(Path(__file__).parent), str(run_dir), os.environ.get("PYTHONPATH", "")]
        variables = {FOLDER: saved, FIRST: "made_up"}
        variables |= {FIXED: "1" if is_fixed else "", PAIRED: "1" if is_paired else ""}
        variables["OMP_NUM_THREADS"] = "1"
        environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(paths)}
        launcher = ["-m", "paceline", *call] if call else []
        command = [sys.executable, *launcher, Path(path).name, *shlex.split(entry.args)]
        try:
            process = subprocess.run(
                command, cwd=(run_dir / path).parent, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as expired:
            return ScriptResult(124, f"{expired.stdout!r}\nlonger than {LIMIT_S} s", [])
        states = [torch.load(file) for file in sorted(Path(saved).glob("*.pt"))]
        return ScriptResult(process.returncode, process.stdout, states)


def publish(entry: Entry, mirrors: Path, folder: Path) -> None:
    """Create `folder`/plain and `folder`/paced: the published files, cut."""
    repository, commit = entry.source
    mirror = mirrors / repository.replace("/", "+") / "repo"
    for file in (entry.script, *entry.more_files):
        command = ["git", "--git-dir", str(mirror), "show", f"{commit}:{file}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode and not file.endswith("__init__.py"):
            sys.exit(result.stderr)
        paced, plain = texts_of(result.stdout, "" if file == entry.script else file, entry.cuts)
        for name, text in (("paced", paced), ("plain", plain)):
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name in ("plain", "paced"):
        FILES[entry.files]((folder / name / (entry.main or entry.script)).parent)


def patch(entry: Entry, folder: Path) -> Row:
    """Patch `folder`/paced with the output of `--check`, and add the hooks to both."""
    home, main = (folder / "paced" / entry.script).parent, entry.main or entry.script
    before = (folder / "paced" / entry.script).read_text()
    command = [sys.executable, "-m", "paceline", "launch", "--check", Path(entry.script).name]
    check = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    if check.returncode:
        return Row(entry, refused=" ".join(check.stderr.split()))
    subprocess.run(["patch", "-p0", "-s"], cwd=home, input=check.stdout, text=True, check=True)
    added, changed = count_changes(before, (folder / "paced" / entry.script).read_text())
    for name in ("plain", "paced"):
        add_hooks(folder / name / main)
    return Row(entry, added, changed)


def add_hooks(script: Path) -> None:
    """Put the first and the last line of the hooks into a script."""
    text = script.read_text()
    future = re.match(r"(?s).*^from __future__ [^\n]*\n", text, re.MULTILINE)
    first = future.end() if future else 0
    script.write_text(text[:first] + BEGIN + text[first:] + END)


def count_changes(old: str, new: str) -> tuple[int, int]:
    """Count lines added and lines changed, without indentation and empty lines."""
    old_lines, new_lines = (
        list(filter(None, map(str.strip, text.splitlines()))) for text in (old, new)
    )
    added = changed = 0
    for kind, a, b, c, d in difflib.SequenceMatcher(
        None, old_lines, new_lines, False
    ).get_opcodes():
        if kind != "equal":
            changed += b - a
            added += max(0, (d - c) - (b - a))
    return added, changed


def largest_difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest difference of a parameter, over the larger of 1 and the largest one."""
    pairs = list(zip(first["parameters"], second["parameters"], strict=True))
    if not all(torch.isfinite(a).all() and torch.isfinite(b).all() for a, b in pairs):
        return float("nan")
    scale = max(1.0, *(float(a.abs().max()) for a, _ in pairs))
    return max(float((a - b).abs().max()) for a, b in pairs) / scale


def is_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first["rates"] == second["rates"] and all(
        torch.equal(a, b) for a, b in zip(first["parameters"], second["parameters"], strict=True)
    )


def describe_failure(result: ScriptResult) -> str:
    """Describe a failed run by the line that names an error, or by its last one."""
    lines = [line.strip() for line in result.output.splitlines() if line.strip()] or [""]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: ", line)]
    return f"ended with {result.code}: {(errors or lines)[-1][:400]}"


def compare(entry: Entry, folder: Path) -> tuple[str, ...]:
    """Return four cells: one worker, full-sync, k-batch-async:2, local-sgd:4."""
    plain, paced = run(entry, folder / "plain"), run(entry, folder / "paced")
    if not plain.is_done:
        say(plain.output[-2000:])
        return (f"the plain one {describe_failure(plain)}", "-", "-", "-")
    is_same = paced.is_done and is_equal(plain.states[0], paced.states[0])
    cell = "equal" if is_same else describe_failure(paced)
    if paced.is_done and not is_same:
        cell = f"DIFFERS by {largest_difference(plain.states[0], paced.states[0]):.1e}"
    for line in difflib.unified_diff(plain.output.splitlines(), paced.output.splitlines(), n=0):
        say(f"    {line[:160]}")
    more_cells = [
        run_by(entry, folder, protocol) for protocol in ("k-batch-async:2", "local-sgd:4")
    ]
    return (cell, full_sync(entry, folder), *more_cells)


def full_sync(entry: Entry, folder: Path) -> str:
    """Return the difference of two workers from plain, with everything fixed."""
    if entry.apart:
        return "n/a"
    plain = run(entry, folder / "plain", is_fixed=True)
    paced = run(entry, folder / "paced", [*WORKERS, "full-sync"], is_fixed=True)
    for result in (plain, paced):
        if not result.is_done:
            say(result.output[-2000:])
    if not plain.is_done or not paced.is_done:
        return "; ".join(
            describe_failure(result) for result in (plain, paced) if not result.is_done
        )
    difference = max(largest_difference(plain.states[0], state) for state in paced.states)
    return f"{difference:.1e}" if difference else "0"


def run_by(entry: Entry, folder: Path, protocol: str) -> str:
    """Check that two workers finish with equal parameters, or are refused by name."""
    result = run(entry, folder / "paced", [*WORKERS, protocol])
    if result.is_done:
        return "yes" if len(result.states) == 2 and is_equal(*result.states) else "UNEQUAL"
    say(result.output[-1500:])
    return "refused" if REFUSAL.search(result.output) else describe_failure(result)


def try_script(entry: Entry, mirrors: Path) -> Row:
    """Check, patch and run a script."""
    say(entry.name)
    with tempfile.TemporaryDirectory() as scratch:
        copies = Path(scratch)
        publish(entry, mirrors, copies)
        row = patch(entry, copies)
        if entry.needs and importlib.util.find_spec(entry.needs) is None:
            row = row._replace(missing=f"not run: `pip install {entry.needs}` first")
        elif not row.refused:
            row = row._replace(cells=compare(entry, copies))
    say(" | ".join(row.texts()))
    return row


def summary(rows: Sequence[Row]) -> list[str]:
    """Summarise the rows."""
    ported = [row for row in rows if not row.refused]
    ran = [row for row in ported if row.cells]
    differences = [row.cells[1] for row in ran if FIGURE.fullmatch(row.cells[1])]
    added = [row.added for row in ported]
    added_and_changed = [row.added + row.changed for row in ported]

    def share(column: int, value: str, total: int) -> str:
        return f"{sum(row.cells[column] == value for row in ran)} of {total}"

    num_close = sum(float(difference) <= TOLERANCE for difference in differences)
    different = ", ".join(row.entry.name for row in ran if row.is_different())
    entries = [
        ("`--check` prints a diff that applies", f"{len(ported)} of {len(rows)}"),
        ("refused by `--check`, with line", str(len(rows) - len(ported))),
        ("run", f"{len(ran)} of {len(ported)}"),
        ("one worker: equal to the last bit", share(0, "equal", len(ran))),
        (
            f"full-sync with 2 workers within {TOLERANCE:.0e} of plain, float64, of those that can "
            "be compared", f"{num_close} of {len(differences)}",
        ),
        ("k-batch-async:2 to its end, both workers equal", share(2, "yes", len(ran))),
        ("k-batch-async:2 refused by name, before the first step", share(2, "refused", len(ran))),
        ("local-sgd:4 to its end, both workers equal", share(3, "yes", len(ran))),
        ("ran to its end otherwise than plain PyTorch, and nothing was said", different or "none"),
        (
            "lines added, median; with those that are changed",
            f"{statistics.median(added):g}; {statistics.median(added_and_changed):g}",
        ),
    ]  # fmt: skip
    return [f"| {label} | {value} |" for label, value in entries]


NOTE = """\
How it was made: each script is taken from its repository at the commit, lines are cut as
`bench/public.py` says (sizes, epochs, the end of a loop that has none, what newer versions no \
longer
have, seeds of what is compared), and `paceline launch --check SCRIPT | patch -p0` is applied; the
script and a plain twin run six times. Data sets, pictures and torchvision's networks are made up by
`bench/made_up.py`: noise in the published shapes, small.

- *One worker*: `python` on both, shuffling, dropout, augmentation and batch norm on; parameters
  and rates at the end, to the last bit. A loop over `pace.updates` alone draws by the number of a
  turn, so its plain twin is seeded by `paceline.step_seed` at the same place, and nanoGPT's draws
  each batch in its own turn.
- *full-sync*: `--workers 2` beside plain, in order, without dropout and augmentation, batch norm
  on its running statistics, noise a constant, float64; the largest difference of a parameter over
  the larger of 1 and the largest parameter, of both workers. Where a turn is one worker's, the twin
  makes an update of each two turns, by their mean gradient.
- *k-batch-async:2, local-sgd:4*: `--workers 2`, to the end; "yes": both workers have equal
  parameters and rates there.

Added, changed: lines of the diff, indentation and empty lines not counted. Once each; """


def section(rows: Sequence[Row], machine_note: str) -> str:
    """Return the newest section of the page."""
    lines = [
        "# Public training scripts under Paceline", "",
        f"`{' '.join(['python', *_command()])}`", "",
        f"{len(rows)} public scripts, chosen before `--check` was asked at them; none was edited "
        "to be carried.", "", "| | of them |", "|---|---|", *summary(rows), "",
        "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER),
        *("| " + " | ".join(row.texts()) + " |" for row in rows), "", f"{NOTE}{machine_note}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _command() -> list[str]:
    """Return the command, without the path of the mirrors."""
    arguments = list(sys.argv)
    arguments[arguments.index("--all") + 1] = "MIRRORS"
    return arguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", type=Path, required=True, help="the folder of bare repositories")
    parser.add_argument("--only", default="", help="run scripts whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="number of scripts to run at once")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine_note = machine()
    entries = [entry for entry in ENTRIES if options.only in entry.name]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda entry: try_script(entry, options.all), entries))
    if options.write:
        older = PAGE.read_text().partition(OLDER)
        PAGE.write_text(f"{section(rows, machine_note)}\n{''.join(older[1:])}")
    else:
        print(section(rows, machine_note))


if __name__ == "__main__":
    main()
