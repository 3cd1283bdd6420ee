"""Public scripts with the lines that `--check` prints, beside the same scripts without them.

    python bench/public_scripts.py --all MIRRORS [--jobs N] --write
    python bench/public_scripts.py --all MIRRORS --only NAME

MIRRORS holds a bare git directory OWNER+NAME/repo of each repository in `bench/public.py`. A script
is taken from there as published, its lines are cut, and it is copied twice; one copy is patched by
what `paceline launch --check` prints, and then six runs, each in a copy of its own:

    plain, one         python SCRIPT, as published: equal to the last bit
    fixed, full-sync   in fixed order, without dropout and noise, batch norm on its running
                       statistics, float64: python SCRIPT beside two workers
    k-batch-async:2, local-sgd:4   as published, two workers: to the end, equal parameters

A script is asked for what its optimizers hold when its last line is done (`bench/watched.py`).
Writes the newest section of results/public-scripts.md; what is older stays below it.
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

LIMIT_S, CLOSE = 300, 1e-12
WORKERS = ["launch", "--workers", "2", "--protocol"]
REFUSAL = re.compile(r"^error: .*\bunder k-batch-async", re.MULTILINE)
FIGURE = re.compile(r"\d[\d.e+-]*|nan")
PAGE = RESULTS / "public-scripts.md"
OLDER = "## Older: "
HEADER = (
    "script", "commit", "added, changed", "one worker", "full-sync 2", "k-batch-async:2",
    "local-sgd:4", "remarks",
)  # fmt: skip


class Ended(NamedTuple):
    """How a run ended, what it printed, and what its workers held, one entry a worker."""

    code: int
    printed: str
    held: list[dict[str, Any]]

    @property
    def is_done(self) -> bool:
        return self.code == 0 and bool(self.held)


class Row(NamedTuple):
    """What became of a script: lines added and changed, and four cells; why it has none."""

    entry: Entry
    added: int = 0
    changed: int = 0
    cells: tuple[str, ...] = ()
    refused: str = ""
    missing: str = ""

    def is_different(self) -> bool:
        """Whether a run came to its end, and not to what it should have come to."""
        is_far = FIGURE.fullmatch(self.cells[1]) and not float(self.cells[1]) <= CLOSE
        return bool(is_far or re.search("DIFFERS|UNEQUAL", " ".join(self.cells)))

    def texts(self) -> list[str]:
        commit = self.entry.source[1][:7]
        lines = f"{self.added}, {self.changed}" if not self.refused else "refused"
        cells = self.cells or ("-",) * 4
        said = [self.entry.remark] if not self.refused else [f'"{self.refused}"']
        remarks = "; ".join(one for one in (*said, self.missing) if one)
        return [self.entry.name, commit, lines, *cells, remarks.replace("|", "/")]


def run(entry: Entry, folder: Path, call: Sequence[str] = (), *, is_fixed: bool = False) -> Ended:
    """Run it in a copy of ``folder``: by python where ``call`` is empty, else by paceline."""
    path = entry.main or entry.script
    is_paired = is_fixed and entry.is_paired and not call
    with tempfile.TemporaryDirectory() as saved:
        place = Path(saved) / "run"
        shutil.copytree(folder, place)
        paths = [str(Path(__file__).parent), str(place), os.environ.get("PYTHONPATH", "")]
        told = {FOLDER: saved, FIRST: "made_up"}
        told |= {FIXED: "1" if is_fixed else "", PAIRED: "1" if is_paired else ""}
        told["OMP_NUM_THREADS"] = "1"
        environment = os.environ | told | {"PYTHONPATH": os.pathsep.join(paths)}
        paced = ["-m", "paceline", *call] if call else []
        command = [sys.executable, *paced, Path(path).name, *shlex.split(entry.args)]
        try:
            ended = subprocess.run(
                command, cwd=(place / path).parent, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            return Ended(124, f"{late.stdout!r}\nlonger than {LIMIT_S} s", [])
        held = [torch.load(path) for path in sorted(Path(saved).glob("*.pt"))]
        return Ended(ended.returncode, ended.stdout, held)


def publish(entry: Entry, mirrors: Path, place: Path) -> None:
    """Make `place`/plain and `place`/paced: the published files, cut."""
    repository, commit = entry.source
    folder = mirrors / repository.replace("/", "+") / "repo"
    for file in (entry.script, *entry.others):
        command = ["git", "--git-dir", str(folder), "show", f"{commit}:{file}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and not file.endswith("__init__.py"):
            sys.exit(done.stderr)
        both, twin = texts_of(done.stdout, "" if file == entry.script else file, entry.cuts)
        for name, text in (("paced", both), ("plain", twin)):
            path = place / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name in ("plain", "paced"):
        FILES[entry.files]((place / name / (entry.main or entry.script)).parent)


def patch(entry: Entry, place: Path) -> Row:
    """Patch `place`/paced by what `--check` prints, and watch both."""
    home, main = (place / "paced" / entry.script).parent, entry.main or entry.script
    before = (place / "paced" / entry.script).read_text()
    command = [sys.executable, "-m", "paceline", "launch", "--check", Path(entry.script).name]
    told = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    if told.returncode:
        return Row(entry, refused=" ".join(told.stderr.split()))
    subprocess.run(["patch", "-p0", "-s"], cwd=home, input=told.stdout, text=True, check=True)
    added, changed = counted(before, (place / "paced" / entry.script).read_text())
    for name in ("plain", "paced"):
        watch(place / name / main)
    return Row(entry, added, changed)


def watch(script: Path) -> None:
    """Put the first and the last line into a script."""
    text = script.read_text()
    future = re.match(r"(?s).*^from __future__ [^\n]*\n", text, re.MULTILINE)
    first = future.end() if future else 0
    script.write_text(text[:first] + BEGIN + text[first:] + END)


def counted(old: str, new: str) -> tuple[int, int]:
    """Lines added, lines changed; indentation and empty lines not counted."""
    olds, news = (list(filter(None, map(str.strip, text.splitlines()))) for text in (old, new))
    added = changed = 0
    for kind, a, b, c, d in difflib.SequenceMatcher(None, olds, news, False).get_opcodes():
        if kind != "equal":
            changed += b - a
            added += max(0, (d - c) - (b - a))
    return added, changed


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a parameter, over the larger of 1 and the largest parameter."""
    pairs = list(zip(one["parameters"], other["parameters"], strict=True))
    if not all(torch.isfinite(a).all() and torch.isfinite(b).all() for a, b in pairs):
        return float("nan")
    scale = max(1.0, *(float(a.abs().max()) for a, _ in pairs))
    return max(float((a - b).abs().max()) for a, b in pairs) / scale


def is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["rates"] == other["rates"] and all(
        torch.equal(a, b) for a, b in zip(one["parameters"], other["parameters"], strict=True)
    )


def why(ended: Ended) -> str:
    """How a run that was not done ended: the line that names an error, else the last one."""
    lines = [line.strip() for line in ended.printed.splitlines() if line.strip()] or [""]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: ", line)]
    return f"ended with {ended.code}: {(named or lines)[-1][:400]}"


def compare(entry: Entry, place: Path) -> tuple[str, ...]:
    """Four cells: one worker, full-sync, k-batch-async:2, local-sgd:4."""
    plain, one = run(entry, place / "plain"), run(entry, place / "paced")
    if not plain.is_done:
        say(plain.printed[-2000:])
        return (f"the plain one {why(plain)}", "-", "-", "-")
    is_same = one.is_done and is_equal(plain.held[0], one.held[0])
    first = "equal" if is_same else why(one)
    if one.is_done and not is_same:
        first = f"DIFFERS by {apart(plain.held[0], one.held[0]):.1e}"
    for line in difflib.unified_diff(plain.printed.splitlines(), one.printed.splitlines(), n=0):
        say(f"    {line[:160]}")
    others = [run_by(entry, place, protocol) for protocol in ("k-batch-async:2", "local-sgd:4")]
    return (first, full_sync(entry, place), *others)


def full_sync(entry: Entry, place: Path) -> str:
    """How far two workers are from plain, where all is fixed."""
    if entry.apart:
        return "n/a"
    fixed = run(entry, place / "plain", is_fixed=True)
    both = run(entry, place / "paced", [*WORKERS, "full-sync"], is_fixed=True)
    for ended in (fixed, both):
        if not ended.is_done:
            say(ended.printed[-2000:])
    if not fixed.is_done or not both.is_done:
        return "; ".join(why(one) for one in (fixed, both) if not one.is_done)
    most = max(apart(fixed.held[0], held) for held in both.held)
    return f"{most:.1e}" if most else "0"


def run_by(entry: Entry, place: Path, protocol: str) -> str:
    """Whether two workers come to the end with equal parameters, or are refused by name."""
    ended = run(entry, place / "paced", [*WORKERS, protocol])
    if ended.is_done:
        return "yes" if len(ended.held) == 2 and is_equal(*ended.held) else "UNEQUAL"
    say(ended.printed[-1500:])
    return "refused" if REFUSAL.search(ended.printed) else why(ended)


def tried(entry: Entry, mirrors: Path) -> Row:
    """Check, patch and run one script."""
    say(entry.name)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        publish(entry, mirrors, place)
        row = patch(entry, place)
        if entry.needs and importlib.util.find_spec(entry.needs) is None:
            row = row._replace(missing=f"not run: `pip install {entry.needs}` first")
        elif not row.refused:
            row = row._replace(cells=compare(entry, place))
    say(" | ".join(row.texts()))
    return row


def summary(rows: Sequence[Row]) -> list[str]:
    """What the rows come to."""
    carried = [row for row in rows if not row.refused]
    ran = [row for row in carried if row.cells]
    near = [row.cells[1] for row in ran if FIGURE.fullmatch(row.cells[1])]
    lines = [row.added for row in carried]
    both = [row.added + row.changed for row in carried]

    def share(place: int, word: str, of: int) -> str:
        return f"{sum(row.cells[place] == word for row in ran)} of {of}"

    num_close = sum(float(one) <= CLOSE for one in near)
    different = ", ".join(row.entry.name for row in ran if row.is_different())
    told = [
        ("`--check` prints a diff that applies", f"{len(carried)} of {len(rows)}"),
        ("refused by `--check`, with line", str(len(rows) - len(carried))),
        ("run", f"{len(ran)} of {len(carried)}"),
        ("one worker: equal to the last bit", share(0, "equal", len(ran))),
        (
            f"full-sync with 2 workers within {CLOSE:.0e} of plain, float64, of those that can be "
            "compared", f"{num_close} of {len(near)}",
        ),
        ("k-batch-async:2 to its end, both workers equal", share(2, "yes", len(ran))),
        ("k-batch-async:2 refused by name, before the first step", share(2, "refused", len(ran))),
        ("local-sgd:4 to its end, both workers equal", share(3, "yes", len(ran))),
        ("ran to its end otherwise than plain PyTorch, and nothing was said", different or "none"),
        (
            "lines added, median; with those that are changed",
            f"{statistics.median(lines):g}; {statistics.median(both):g}",
        ),
    ]  # fmt: skip
    return [f"| {one} | {other} |" for one, other in told]


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


def section(rows: Sequence[Row], where: str) -> str:
    """The newest section of the page."""
    lines = [
        "# Public training scripts under Paceline", "", f"`{' '.join(['python', *_words()])}`", "",
        f"{len(rows)} public scripts, chosen before `--check` was asked at them; none was edited "
        "to be carried.", "", "| | of them |", "|---|---|", *summary(rows), "",
        "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER),
        *("| " + " | ".join(row.texts()) + " |" for row in rows), "", f"{NOTE}{where}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _words() -> list[str]:
    """What was called, without saying where the mirrors lie."""
    words = list(sys.argv)
    words[words.index("--all") + 1] = "MIRRORS"
    return words


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", type=Path, required=True, help="the folder of bare repositories")
    parser.add_argument("--only", default="", help="scripts whose name has this in it")
    parser.add_argument("--jobs", type=int, default=1, help="scripts that are run at once")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    where = machine()
    chosen = [one for one in ENTRIES if options.only in one.name]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda entry: tried(entry, options.all), chosen))
    if options.write:
        older = PAGE.read_text().partition(OLDER)
        PAGE.write_text(f"{section(rows, where)}\n{''.join(older[1:])}")
    else:
        print(section(rows, where))


if __name__ == "__main__":
    main()
