"""What it costs a run without faults that it would survive them: whole runs, with and without.

    python bench/calm.py [--rounds 8] [--seconds 40] [--write]

LeNet, batch 256, two workers, full-sync. A run that is ready for everything (``--respawn``, a
checkpoint every 10 s, three times as often as usual) beside one that is ready for nothing (no new
lives, no checkpoints), and that one once more, in turn. What counts are the updates within the same
time from the first step on. The 95 % interval is by bootstrap over the rounds. Writes
results/calm.md.
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


def updates_a_second(seconds: float, ready: dict[str, Any]) -> float:
    """Of one run, over so many seconds from its first step on."""
    with tempfile.TemporaryDirectory() as folder:
        run_in(Path(folder), "lenet", workers=2, batch_size=256, seconds=seconds + SLACK_S,
               epochs=1000, device="cpu", **ready)  # fmt: skip
        records = records_of(Path(folder))
    start_s = first_grant_s(records)
    made = [one for one in records if isinstance(one, Ordered) and isinstance(one.order, Apply)]
    return sum(one.t_s - start_s <= seconds for one in made) / seconds


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
            rates[name].append(updates_a_second(options.seconds, WAYS[name]))
    rows = [[f"{name}: updates a second", spread(values), ""] for name, values in rates.items()]
    for name, judged in (("ready", True), ("plain again", False)):
        lost = [1.0 - a / b for a, b in zip(rates[name], rates["plain"], strict=True)]
        middle, low, high = interval(lost)
        wanted = f"<= {WANTED:.0%}: {'yes' if high <= WANTED else 'no'}" if judged else "0 inside"
        rows.append([f"{name}, slower than plain by", f"{middle:.2%} ({low:.2%} to {high:.2%})",
                     wanted])  # fmt: skip
    for row in rows:
        print(" | ".join(row))
    if options.write:
        header = ["what", "measured", "wanted"]
        how = f"{options.rounds} rounds of {options.seconds:g} s each; medians. {note}"
        write_table("calm", "What survival costs where nothing happens", header, rows, how)


if __name__ == "__main__":
    main()
