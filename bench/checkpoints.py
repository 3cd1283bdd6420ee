"""``kill -9`` of whole runs while they save checkpoints; then ``--resume auto`` to their end.

    python bench/checkpoints.py [--runs 100] [--write]

A real run of each protocol, whose script's weights count (tests/support/counted.py), saves a
checkpoint after each update. While one is being written its launcher is killed, and with it every
worker and the writer; a random time later, so that all moments of a save are met. The run is then
gone on with. At its end each sample of each epoch must be in exactly one update that is left, and
the weights must be those that the updates in the trace make. Writes results/checkpoints.md; ends
with 1 where one is not.
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

EVERY = (*PROTOCOLS, *OTHERS)
LATER_S = 0.02
"""The kill comes at most so long after a save has begun."""
AT_ONCE = 2
"""Runs."""
HEADER = ("protocol", "runs killed", "in a save", "went on to their end", "samples lost",
          "doubled", "other weights", "else wrong")  # fmt: skip


def drawn(seed: int) -> Plan:
    """A run, and the kill that ends it."""
    rng = random.Random(seed)
    kill = Strike(
        target="launcher", moment="checkpoint", cue="checkpoint", after_s=rng.uniform(0.0, LATER_S)
    )
    return Plan(
        seed=seed, protocol=EVERY[seed % len(EVERY)], workers=rng.choice((2, 3, 4)),
        samples=24 * rng.randint(4, 8) + rng.randint(0, 23), batch=24, epochs=2,
        pause_s=rng.choice((0.0, 0.005, 0.02)), every="1 updates", strikes=(kill,),
        path=rng.choice(("auto", "store")),
    )  # fmt: skip


def tried(seed: int) -> Trial:
    with tempfile.TemporaryDirectory() as folder:
        one = trial(drawn(seed), Path(folder))
    return replace(one, outcome=replace(one.outcome, finals=()))  # what they name is gone


def row(name: str, trials: list[Trial]) -> list[str]:
    killed = [one for one in trials if one.outcome.launches[0].code == -9]
    ends = [one for one in killed if one.outcome.launches[-1].code == 0]
    wrong = [kind for one in trials for kind in one.complaints]
    counts = [wrong.count(kind) for kind in ("lost", "doubled", "weights")]
    saved = sum(one.outcome.unfinished > 0 for one in killed)
    numbers = [len(killed), saved, len(ends), *counts, len(wrong) - sum(counts)]
    return [name, *map(str, numbers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        trials = list(pool.map(tried, range(options.runs)))
    rows = [row("all", trials)]
    rows += [row(name, [one for one in trials if one.plan.protocol == name]) for name in EVERY]
    for cells in rows:
        print(" | ".join(cells))
    bad = [one for one in trials if one.complaints]
    for one in bad:
        print(one.plan, one.complaints, file=sys.stderr)
    if options.write:
        title = f"Killed while it saves, and resumed: {options.runs} runs"
        how = f"A run that ended before the kill came is not counted as killed. {note}"
        write_table("checkpoints", title, HEADER, rows, how)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
