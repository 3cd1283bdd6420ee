"""Havoc: 500 quick runs whose processes get signals at random moments.

    python bench/havoc.py [--runs 500] [--first 0] [--at-once 2] [--write]

Each run is a launcher with its workers; 1 to 6 signals (KILL, STOP, TERM, INT, HUP, SEGV) go to its
workers, the launcher, the process that forks workers and the writer of checkpoints, at moments
drawn from its seed. tests/support/havoc_plan.py draws a run, havoc_verdict.py beside it judges it.
A failure is printed with the seed and the folder of the run, which is kept; the exit code is 1.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from havoc_plan import MOMENTS, OTHERS, PROTOCOLS, SIGNALS, TARGETS, Plan, draw
from havoc_verdict import KINDS, Trial, trial
from table import machine, write_table

HEADER = (
    "of what", "runs", "faults", "ended whole", "ended by a fault, finished by --resume auto",
    "hangs", "tracebacks", "not in words", "samples lost", "doubled", "other weights",
    "left behind",
)  # fmt: skip
NOTE = (
    "A run counts in each row of a fault that struck it; faults that come after a run's end strike "
    "nobody. The last seven columns count runs. Hangs: no end within 60 s, waiting without saying "
    "for whom, or an end more than 10 s after TERM, INT or HUP. Other weights: not those that the "
    "updates in the trace make. Left behind: processes, and files in the temporary folder, after "
    "3 s, but for the empty ones that torch opens for a moment where a loader's worker is gone."
)


def run_plans(plans: list[Plan], at_once: int) -> Iterator[Trial]:
    """Run the plans; remove the folders of runs without complaints."""

    def run_plan(plan: Plan) -> Trial:
        folder = Path(tempfile.mkdtemp(prefix=f"havoc-{plan.seed}-"))
        result = trial(plan, folder)
        if not result.complaints:
            shutil.rmtree(folder)
        return result

    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(run_plan, plans)


class Figures:
    """Rows of the table: for all, each protocol, each target and signal, and each moment."""

    def __init__(self) -> None:
        self._rows: dict[str, Counter[str]] = {}

    def add(self, result: Trial) -> None:
        """Count a run and its faults in each row to which they belong."""
        plan, outcome = result.plan, result.outcome
        strikes = [plan.strikes[i] for i in outcome.struck]
        kinds = Counter(f"{strike.kind}: {strike.signal}" for strike in strikes)
        moments = Counter(f"moment: {strike.moment}" for strike in strikes)
        faults_by_row = {"all": len(strikes), plan.protocol: len(strikes), **kinds, **moments}
        ended = "whole" if len(outcome.launches) == 1 else "resumed"
        for name, num_faults in faults_by_row.items():
            row = self._rows.setdefault(name, Counter())
            row.update({"runs": 1, "faults": num_faults, ended: 1})
            row.update(result.complaints.keys())

    def rows(self) -> list[list[str]]:
        """Return the rows in the order of the lists from which plans are drawn."""
        targets = [f"{kind}: {name}" for kind in sorted(set(TARGETS)) for name in SIGNALS]
        moments = [f"moment: {name}" for name in (*MOMENTS, "a line")]
        names = ["all", *PROTOCOLS, *OTHERS, *targets, *moments]
        columns = ("runs", "faults", "whole", "resumed", *KINDS)
        return [
            [name, *(str(self._rows[name][column]) for column in columns)]
            for name in names
            if name in self._rows
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--protocol", action="append", choices=PROTOCOLS + OTHERS)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    protocols = tuple(arguments.protocol or PROTOCOLS)
    seeds = range(arguments.first, arguments.first + arguments.runs)
    figures, machine_note, start_s = Figures(), machine(), time.monotonic()
    num_bad = num_struck = 0
    for result in run_plans([draw(seed, protocols) for seed in seeds], arguments.at_once):
        figures.add(result)
        num_struck += len(result.outcome.struck)
        num_bad += bool(result.complaints)
        print(*_lines(result), sep="\n", flush=True)
    minutes = (time.monotonic() - start_s) / 60.0
    print(f"{arguments.runs} runs, {num_struck} faults, {num_bad} bad, {minutes:.0f} minutes")
    if arguments.write:
        title = f"Havoc: {num_struck} faults in {arguments.runs} runs"
        note = f"{NOTE} {minutes:.0f} minutes; {machine_note}."
        write_table("havoc", title, HEADER, figures.rows(), note)
    sys.exit(bool(num_bad))


def _lines(result: Trial) -> list[str]:
    """Describe a run in one line, and its complaints in others."""
    plan, launches = result.plan, result.outcome.launches
    endings = ", ".join(f"exit {launch.code} after {launch.took_s:.1f} s" for launch in launches)
    lines = [f"{plan.seed}: {plan.protocol}, {len(result.outcome.struck)} faults, {endings}"]
    if result.complaints:
        lines += [str(plan)]
        lines += [
            f"  {plan.strikes[i]}: {location}" for i, location in result.outcome.struck.items()
        ]
        lines += [
            f"  {kind}: {text}" for kind, texts in result.complaints.items() for text in texts
        ]
        lines += [f"  see {result.outcome.run.parent}"]
    return lines


if __name__ == "__main__":
    main()
