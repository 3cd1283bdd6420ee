"""What is called likely, beside live runs: how many lie within it, and how wide it is.

    python bench/likely.py [--rounds 6] [--pause SECONDS] [--write]

Two workers that compute, mini-batches of 64, nothing ordered. A round takes a profile of each task
(k-batch-async:2, 20 s, as `plan` does), predicts five protocols from it, and then runs each live: a
prediction knows nothing that came after it. All runs count, whatever else the machine did. Live is
what a run reports, seconds an update from the first grant to the last update.
Writes results/likely.md.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from paceline.predict.simulation import World, forecast
from quiet_runs import first_grant_s, records_of, run_in, update_times_s
from table import machine, write_table

COMPUTING = {"full-sync": 450, "k-sync:1": 600, "k-batch-sync:2": 450, "k-batch-async:2": 450,
             "async": 900}  # fmt: skip
"""Protocols, and updates of a live run: less than an epoch, from 12 to 25 s."""
TASKS = {"lenet": 64, "mlp": 64}
"""Tasks, and their mini-batches."""
PROFILE, PROFILE_S, SEED = "k-batch-async:2", 20.0, 1
"""As `paceline plan` takes it."""
COVERAGE, WIDTH = 0.90, 0.25


class Tried(NamedTuple):
    """A live run, what was predicted of it, and what was called likely; seconds an update."""

    live_s: float
    predicted_s: float
    from_s: float
    until_s: float

    @property
    def is_within(self) -> bool:
        return self.from_s <= self.live_s <= self.until_s

    @property
    def width(self) -> float:
        return (self.until_s - self.from_s) / self.predicted_s


def one_round(task: str, mini_batch: int) -> dict[str, tuple[float, Tried]]:
    """By protocol: the drift of the profile, and what came of its prediction."""
    live = {"workers": 2, "mini_batch_size": mini_batch, "path": "store", "seed": SEED}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile"
        run_in(profile, task, **live, protocol=PROFILE, seconds=PROFILE_S)
        for i, (text, num_updates) in enumerate(COMPUTING.items()):
            told = forecast(text, 2, World(like=profile, seed=SEED), num_updates)
            assert told.time_likely_s is not None
            assert told.machine_drift is not None
            place = Path(folder) / str(i)
            run_in(place, task, **live, protocol=text, updates=num_updates)
            records = records_of(place)
            times_s = update_times_s(records)
            live_s = (times_s[-1] - first_grant_s(records)) / len(times_s)
            tried = Tried(live_s, told.time_per_update_s, *told.time_likely_s)
            found[text] = told.machine_drift, tried
    return found


def summed(tried: list[Tried]) -> list[str]:
    """Live, predicted, how far off, how many lie within what was likely, how wide that was."""
    offs = [100 * (one.predicted_s / one.live_s - 1) for one in tried]
    return [
        f"{statistics.median(offs):+.1f} ({min(offs):+.1f} to {max(offs):+.1f})",
        f"{sum(one.is_within for one in tried)} of {len(tried)}",
        f"{100 * statistics.median(one.width for one in tried):.0f} %",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between rounds")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, drifts = machine(), []
    found: dict[tuple[str, str], list[Tried]] = {}
    for number in range(options.rounds):
        time.sleep(options.pause if number else 0.0)
        for task, mini_batch in TASKS.items():
            for text, (drift, tried) in one_round(task, mini_batch).items():
                found.setdefault((task, text), []).append(tried)
                drifts.append(drift)
                words = f"{1e3 * tried.live_s:.2f} live, {1e3 * tried.predicted_s:.2f} predicted"
                likely = f"{1e3 * tried.from_s:.2f} to {1e3 * tried.until_s:.2f} likely"
                print(f"{number + 1}: {task} {text}: {words}, {likely}, drift {drift:.3f}",
                      file=sys.stderr, flush=True)  # fmt: skip
    rows = []
    for (task, text), tries in found.items():
        live_ms, predicted_ms = (
            f"{1e3 * statistics.median(values):.2f}"
            for values in ([one.live_s for one in tries], [one.predicted_s for one in tries])
        )
        rows.append([task, text, live_ms, predicted_ms, *summed(tries), ""])
    every = [one for tries in found.values() for one in tries]
    is_held = sum(one.is_within for one in every) >= COVERAGE * len(every)
    is_narrow = statistics.median(one.width for one in every) <= WIDTH
    verdict = f"{'yes' if is_held else 'no'}, {'yes' if is_narrow else 'no'}"
    rows.append(["all", "", "", "", *summed(every), verdict])
    for row in rows:
        print(" | ".join(row))
    if options.write:
        header = ["task", "protocol", "live, ms an update", "predicted, ms", "predicted off, %",
                  "runs within what was likely", "its width, of the predicted",
                  f">= {COVERAGE:.0%} within, <= {WIDTH:.0%} wide"]  # fmt: skip
        how = (
            f"{options.rounds} rounds, {options.pause:g} s apart; medians (least to most). The "
            f"machine's drift while it was profiled: {100 * statistics.median(drifts):.1f} % "
            f"({100 * min(drifts):.1f} to {100 * max(drifts):.1f}). {note}"
        )
        write_table("likely", "What is likely, beside live runs", header, rows, how)


if __name__ == "__main__":
    main()
