"""The cost of fault tolerance for a run without faults: whole runs, with and without it.

    python bench/calm.py [--rounds 8] [--seconds 40] [--write]

LeNet, batch 256, two workers, full-sync. A run that is ready for faults (``--respawn``, a
checkpoint every 10 s, three times as often as usual) against one that is not (no new lives, no
checkpoints), and the latter once more, in turn. Updates are counted over the same time from the
first step on. The 95 % interval is by bootstrap over the rounds. Writes results/calm.md.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from paceline.events import Apply
from paceline.trace.records import Ordered
from quiet_runs import first_grant_s, records_of, run_in
from table import interval, machine, spread, write_table

READY: dict[str, Any] = {"respawn": True, "checkpoint_every": "10s"}
PLAIN: dict[str, Any] = {"checkpoint_every": "never"}
WAYS = {"ready": READY, "plain": PLAIN, "plain again": PLAIN}
SLACK_S, WANTED = 5.0, 0.01


def updates_per_s(seconds: float, settings: dict[str, Any]) -> float:
    """Return the updates a second of one run, over ``seconds`` from its first step on."""
    with tempfile.TemporaryDirectory() as folder:
        run_in(Path(folder), "lenet", workers=2, batch_size=256, seconds=seconds + SLACK_S,
               epochs=1000, device="cpu", **settings)  # fmt: skip
        records = records_of(Path(folder))
    start_s = first_grant_s(records)
    applied = [
        record
        for record in records
        if isinstance(record, Ordered) and isinstance(record.order, Apply)
    ]
    return sum(record.t_s - start_s <= seconds for record in applied) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(options.rounds):
        for name in WAYS if number % 2 else reversed(WAYS):
            rates[name].append(updates_per_s(options.seconds, WAYS[name]))
    rows = [[f"{name}: updates a second", spread(values), ""] for name, values in rates.items()]
    for name, is_judged in (("ready", True), ("plain again", False)):
        slowdowns = [1.0 - a / b for a, b in zip(rates[name], rates["plain"], strict=True)]
        median, low, high = interval(slowdowns)
        wanted = (
            f"<= {WANTED:.0%}: {'yes' if high <= WANTED else 'no'}" if is_judged else "0 inside"
        )
        rows.append([f"{name}, slower than plain by", f"{median:.2%} ({low:.2%} to {high:.2%})",
                     wanted])  # fmt: skip
    for row in rows:
        print(" | ".join(row))
    if options.write:
        header = ["what", "measured", "wanted"]
        method = f"{options.rounds} rounds of {options.seconds:g} s each; medians. {note}"
        write_table("calm", "What survival costs where nothing happens", header, rows, method)


if __name__ == "__main__":
    main()
