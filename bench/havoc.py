"""Havoc: 500 quick runs whose processes are struck at random moments.

    python bench/havoc.py [--runs 500] [--first 0] [--at-once 2] [--write]

Each run is a launcher with its workers; 1 to 6 signals (KILL, STOP, TERM, INT, HUP, SEGV) meet its
workers, the launcher, the process that forks workers and the writer of checkpoints, at moments
that its seed draws. tests/havoc_plan.py says what is drawn, tests/havoc_verdict.py what is judged.
What went wrong is printed with the seed and the folder of the run, which stays. Ends with 1 then.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from havoc_plan import OTHERS, PROTOCOLS, Plan, draw
from havoc_verdict import Trial, trial


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
    num_bad = num_struck = 0
    for one in trials([draw(seed, protocols) for seed in seeds], arguments.at_once):
        num_struck += len(one.outcome.struck)
        for line in _lines(one):
            print(line, flush=True)
        num_bad += bool(one.complaints)
    print(f"{arguments.runs} runs, {num_struck} faults, {num_bad} bad")
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
