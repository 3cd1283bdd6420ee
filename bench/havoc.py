"""Havoc: 500 quick runs whose processes are struck at random moments.

    python bench/havoc.py [--runs 500] [--first 0] [--at-once 2] [--write]

Each run is a launcher with its workers; 1 to 6 signals (KILL, STOP, TERM, INT, HUP, SEGV) meet its
workers, the launcher, the process that forks workers and the writer of checkpoints, at moments
that its seed draws. What is drawn stands in tests/support/havoc_plan.py, what is judged in
havoc_verdict.py beside it. What went wrong is printed with the seed and the folder of the run,
which stays. Ends with 1 then.
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


def trials(plans: list[Plan], at_once: int) -> Iterator[Trial]:
    """Carry them out; what went well leaves no folder."""

    def one(plan: Plan) -> Trial:
        folder = Path(tempfile.mkdtemp(prefix=f"havoc-{plan.seed}-"))
        found = trial(plan, folder)
        if not found.complaints:
            shutil.rmtree(folder)
        return found

    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(one, plans)


class Figures:
    """Rows of the table: for everything, each protocol, each target and signal, and each moment."""

    def __init__(self) -> None:
        self._rows: dict[str, Counter[str]] = {}

    def add(self, one: Trial) -> None:
        """Count a run in each row that it belongs to; faults where each belongs."""
        plan, outcome = one.plan, one.outcome
        struck = [plan.strikes[i] for i in outcome.struck]
        kinds = Counter(f"{each.kind}: {each.signal}" for each in struck)
        moments = Counter(f"moment: {each.moment}" for each in struck)
        everything = {"all": len(struck), plan.protocol: len(struck), **kinds, **moments}
        ended = "whole" if len(outcome.launches) == 1 else "resumed"
        for name, num_faults in everything.items():
            row = self._rows.setdefault(name, Counter())
            row.update({"runs": 1, "faults": num_faults, ended: 1})
            row.update(one.complaints.keys())

    def rows(self) -> list[list[str]]:
        """In the order of the lists that plans are drawn from."""
        targets = [f"{kind}: {name}" for kind in sorted(set(TARGETS)) for name in SIGNALS]
        moments = [f"moment: {name}" for name in (*MOMENTS, "a line")]
        names = ["all", *PROTOCOLS, *OTHERS, *targets, *moments]
        columns = ("runs", "faults", "whole", "resumed", *KINDS)
        return [
            [name, *(str(self._rows[name][one]) for one in columns)]
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
    figures, where, start_s = Figures(), machine(), time.monotonic()
    num_bad = num_struck = 0
    for one in trials([draw(seed, protocols) for seed in seeds], arguments.at_once):
        figures.add(one)
        num_struck += len(one.outcome.struck)
        num_bad += bool(one.complaints)
        print(*_lines(one), sep="\n", flush=True)
    minutes = (time.monotonic() - start_s) / 60.0
    print(f"{arguments.runs} runs, {num_struck} faults, {num_bad} bad, {minutes:.0f} minutes")
    if arguments.write:
        title = f"Havoc: {num_struck} faults in {arguments.runs} runs"
        note = f"{NOTE} {minutes:.0f} minutes; {where}."
        write_table("havoc", title, HEADER, figures.rows(), note)
    sys.exit(bool(num_bad))


def _lines(one: Trial) -> list[str]:
    """A run in a line, and what is wrong with it."""
    plan, launches = one.plan, one.outcome.launches
    ends = ", ".join(f"exit {each.code} after {each.took_s:.1f} s" for each in launches)
    lines = [f"{plan.seed}: {plan.protocol}, {len(one.outcome.struck)} faults, {ends}"]
    if one.complaints:
        lines += [str(plan)]
        lines += [f"  {plan.strikes[i]}: {where}" for i, where in one.outcome.struck.items()]
        lines += [f"  {kind}: {text}" for kind, all_ in one.complaints.items() for text in all_]
        lines += [f"  see {one.outcome.run.parent}"]
    return lines


if __name__ == "__main__":
    main()
