"""``kill -9`` of whole runs while they save checkpoints; then ``--resume auto`` to the end.

    python bench/checkpoints.py [--runs 100] [--write]

A real run of each protocol, whose script's weights count (tests/support/counted.py), saves a
checkpoint after each update, or as soon as the one before is written. A random time after a save
begins, but not the first, so that all moments of a save are hit, its launcher is killed, and with
it every worker and the writer. The run is then resumed. At its end each sample of each epoch must
be in exactly one remaining update, and the weights must be those of the updates in the trace.
Writes results/checkpoints.md; exits with 1 otherwise, or if a run was not killed, did not resume
from a checkpoint, or did not finish.
"""

import argparse
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from havoc_plan import OTHERS, PROTOCOLS, Plan, Strike
from havoc_verdict import Trial, trial
from table import machine, write_table

ALL_PROTOCOLS = (*PROTOCOLS, *OTHERS)
MAX_DELAY_S = 0.02
"""Longest seconds from the start of a save to the kill."""
SAVES = (2, 5)
"""The first and the last save in which a run may be killed: before, there is no checkpoint."""
AT_ONCE = 2
"""Number of runs at once."""
HEADER = ("protocol", "runs killed", "in a save", "resumed from a checkpoint",
          "went on to their end", "samples lost", "doubled", "other weights",
          "else wrong")  # fmt: skip


def draw_plan(seed: int) -> Plan:
    """Draw a run, and the kill that ends it."""
    rng = random.Random(seed)
    kill = Strike(
        target="launcher",
        moment="checkpoint",
        cue=f"checkpoint {rng.randint(*SAVES)}",
        after_s=rng.uniform(0.0, MAX_DELAY_S),
    )
    return Plan(
        seed=seed, protocol=ALL_PROTOCOLS[seed % len(ALL_PROTOCOLS)], workers=rng.choice((2, 3, 4)),
        samples=24 * rng.randint(4, 8) + rng.randint(0, 23), batch=24, epochs=8,
        pause_s=rng.choice((0.0, 0.005, 0.02)), every="1 updates", strikes=(kill,),
        path=rng.choice(("auto", "store")),
    )  # fmt: skip


def run_trial(seed: int) -> Trial:
    with tempfile.TemporaryDirectory() as folder:
        result = trial(draw_plan(seed), Path(folder))
    return replace(result, outcome=replace(result.outcome, finals=()))  # their folder is deleted


def is_killed(result: Trial) -> bool:
    return result.outcome.launches[0].code == -9


def is_resumed(result: Trial) -> bool:
    return is_killed(result) and not result.outcome.is_anew


def is_finished(result: Trial) -> bool:
    return result.outcome.launches[-1].code == 0


def row(name: str, trials: list[Trial]) -> list[str]:
    killed = [result for result in trials if is_killed(result)]
    complaints = [kind for result in trials for kind in result.complaints]
    counts = [complaints.count(kind) for kind in ("lost", "doubled", "weights")]
    num_in_save = sum(result.outcome.unfinished > 0 for result in killed)
    counts_of_row = [
        len(killed),
        num_in_save,
        sum(map(is_resumed, trials)),
        sum(map(is_finished, killed)),
        *counts,
        len(complaints) - sum(counts),
    ]
    return [name, *map(str, counts_of_row)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        trials = list(pool.map(run_trial, range(options.runs)))
    rows = [row("all", trials)]
    rows += [
        row(name, [result for result in trials if result.plan.protocol == name])
        for name in ALL_PROTOCOLS
    ]
    for cells in rows:
        print(" | ".join(cells))
    failures = [
        result
        for result in trials
        if result.complaints or not (is_resumed(result) and is_finished(result))
    ]
    for result in failures:
        print(result.plan, result.complaints, file=sys.stderr)
    if options.write:
        title = f"Killed while it saves, and resumed: {options.runs} runs"
        method = f"A run that ended before the kill came is not counted as killed. {note}"
        write_table("checkpoints", title, HEADER, rows, method)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
