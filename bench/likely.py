"""The interval called likely, against live runs: how many lie within it, and its width.

    python bench/likely.py [--rounds 6] [--pause SECONDS] [--write]

Two workers that compute, mini-batches of 64, without stragglers. A round takes a profile of each
task (k-batch-async:2, 20 s, as `plan` does), predicts five protocols from it, and then runs each
live, so that a prediction precedes its run. All runs count, whatever the load of the machine. Live
is what a run reports, seconds an update from the first grant to the last update.
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
"""Protocol -> updates of a live run: less than an epoch, from 12 to 25 s."""
TASKS = {"lenet": 64, "mlp": 64}
"""Task -> mini-batch."""
PROFILE, PROFILE_S, SEED = "k-batch-async:2", 20.0, 1
"""The profile, as in `paceline plan`."""
COVERAGE, WIDTH = 0.90, 0.25


class LikelyTrial(NamedTuple):
    """A live run, its prediction, and the likely interval; seconds an update."""

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


def run_round(task: str, mini_batch: int) -> dict[str, tuple[float, LikelyTrial]]:
    """Return the drift of the profile and the comparison, by protocol."""
    live = {"workers": 2, "mini_batch_size": mini_batch, "path": "store", "seed": SEED}
    comparisons = {}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile"
        run_in(profile, task, **live, protocol=PROFILE, seconds=PROFILE_S)
        for i, (text, num_updates) in enumerate(COMPUTING.items()):
            prediction = forecast(text, 2, World(like=profile, seed=SEED), num_updates)
            assert prediction.time_likely_s is not None
            assert prediction.machine_drift is not None
            run_dir = Path(folder) / str(i)
            run_in(run_dir, task, **live, protocol=text, updates=num_updates)
            records = records_of(run_dir)
            times_s = update_times_s(records)
            live_s = (times_s[-1] - first_grant_s(records)) / len(times_s)
            comparison = LikelyTrial(
                live_s, prediction.time_per_update_s, *prediction.time_likely_s
            )
            comparisons[text] = prediction.machine_drift, comparison
    return comparisons


def summary(comparisons: list[LikelyTrial]) -> list[str]:
    """Summarise the deviation, the number within the likely interval, and its width."""
    deviations = [
        100 * (comparison.predicted_s / comparison.live_s - 1) for comparison in comparisons
    ]
    return [
        f"{statistics.median(deviations):+.1f} ({min(deviations):+.1f} to {max(deviations):+.1f})",
        f"{sum(comparison.is_within for comparison in comparisons)} of {len(comparisons)}",
        f"{100 * statistics.median(comparison.width for comparison in comparisons):.0f} %",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between rounds")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, drifts = machine(), []
    by_case: dict[tuple[str, str], list[LikelyTrial]] = {}
    for number in range(options.rounds):
        time.sleep(options.pause if number else 0.0)
        for task, mini_batch in TASKS.items():
            for text, (drift, comparison) in run_round(task, mini_batch).items():
                by_case.setdefault((task, text), []).append(comparison)
                drifts.append(drift)
                figures = (
                    f"{1e3 * comparison.live_s:.2f} live, "
                    f"{1e3 * comparison.predicted_s:.2f} predicted"
                )
                likely = f"{1e3 * comparison.from_s:.2f} to {1e3 * comparison.until_s:.2f} likely"
                print(f"{number + 1}: {task} {text}: {figures}, {likely}, drift {drift:.3f}",
                      file=sys.stderr, flush=True)  # fmt: skip
    rows = []
    for (task, text), comparisons in by_case.items():
        live_ms, predicted_ms = (
            f"{1e3 * statistics.median(values):.2f}"
            for values in (
                [comparison.live_s for comparison in comparisons],
                [comparison.predicted_s for comparison in comparisons],
            )
        )
        rows.append([task, text, live_ms, predicted_ms, *summary(comparisons), ""])
    all_comparisons = [comparison for comparisons in by_case.values() for comparison in comparisons]
    is_covered = sum(comparison.is_within for comparison in all_comparisons) >= COVERAGE * len(
        all_comparisons
    )
    is_narrow = statistics.median(comparison.width for comparison in all_comparisons) <= WIDTH
    verdict = f"{'yes' if is_covered else 'no'}, {'yes' if is_narrow else 'no'}"
    rows.append(["all", "", "", "", *summary(all_comparisons), verdict])
    for row in rows:
        print(" | ".join(row))
    if options.write:
        header = ["task", "protocol", "live, ms an update", "predicted, ms", "predicted off, %",
                  "runs within what was likely", "its width, of the predicted",
                  f">= {COVERAGE:.0%} within, <= {WIDTH:.0%} wide"]  # fmt: skip
        method = (
            f"{options.rounds} rounds, {options.pause:g} s apart; medians (least to most). The "
            f"machine's drift while it was profiled: {100 * statistics.median(drifts):.1f} % "
            f"({100 * min(drifts):.1f} to {100 * max(drifts):.1f}). {note}"
        )
        write_table("likely", "What is likely, beside live runs", header, rows, method)


if __name__ == "__main__":
    main()
