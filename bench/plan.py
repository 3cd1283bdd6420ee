"""The advice of ``plan`` against the whole grid, run live: time to a target training loss.

    python bench/plan.py [--write] [--only steady|slow|exp|pareto]

Softmax regression, 4 workers with mini-batches of 16 and learning rate 0.05 (where staleness begins
to matter), which sleep as the setting says on top of computing, so that four fit on two cores:

steady  each step 40 ms          exp     40 ms in the mean, exponential
slow    30 ms, worker 0 5x slow  pareto  pareto:2.2,20ms

In each setting ``plan`` gets the stragglers, takes its own profile of 2 workers, and chooses. Then
every protocol and K that it raced is run live with one seed, the advised and the four best of those
with two more, and the advised and the best of the others with four more: the best of five noisy
medians looks better than it is. The target is a training loss of 0.7, the mean over the pushes of
the last fifth of the time; the ratio is that of the median times to it, from the first grant on. A
run ends after 1.6 times the shortest time so far, since a slower one is not the best.
"""

import argparse
import math
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

from paceline.predict.advice import Question, advise, family
from paceline.predict.pursuit import Goal
from paceline.predict.race import LAST_SHARE
from paceline.trace.records import Handed, Record
from quiet_runs import first_grant_s, records_of, run_in
from table import machine, write_table

Row = list[str]
WORKERS, MINI_BATCH, LEARNING_RATE = 4, 16, 0.05
SETTINGS: dict[str, dict[str, Any]] = {
    "steady": {"delay": ("40ms",)},
    "slow": {"delay": ("30ms",), "slow": ("0=5x",)},
    "exp": {"delay": ("exp:40ms",)},
    "pareto": {"delay": ("pareto:2.2,20ms",)},
}
TARGET, MIN_PUSHES = 0.7, 100
"""The target loss, and the least number of pushes, since fewer may reach it by chance."""
LIMIT_S, STRETCH, RACE_S = 16.0, 1.6, 60.0
SEEDS, MORE_SEEDS = (1, 2, 3), range(4, 8)
NUM_AGAIN = 4
WANTED = 1.1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=SETTINGS)
    options = parser.parse_args()
    note = machine()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # for the profiles
        for name in SETTINGS:
            if options.only in (None, name):
                for row in setting_rows(name):
                    rows.append([f"{name}: {row[0]}", *row[1:]])
                    print(" | ".join(rows[-1]), flush=True)
    if options.write:
        header = ["protocol", "seconds to the target, live", "of the best", "wanted", "reached"]
        write_table("plan", "What plan advises, and the whole grid", header, rows, note)


def setting_rows(name: str) -> Iterator[Row]:
    """Yield the advised protocol first, then all others that were run, fastest first."""
    stragglers = SETTINGS[name]
    advice = advise(
        Question(
            task="softmax", workers=WORKERS, cores=2, race_s=RACE_S, seed=1,
            mini_batch_size=MINI_BATCH, lr=LEARNING_RATE, goal=Goal(loss=TARGET), **stragglers,
        )
    )  # fmt: skip
    advised = advice.candidates[0].forecast.protocol
    limit_s, times_s = LIMIT_S, dict[str, list[float]]()
    for text in family(WORKERS):
        times_s[text] = [live_s(text, SEEDS[0], stragglers, limit_s)]
        limit_s = min(limit_s, STRETCH * times_s[text][0])
    by_first_run = sorted(times_s, key=lambda text: times_s[text][0])
    finalists = {advised, *by_first_run[:NUM_AGAIN]}
    for text in finalists:
        times_s[text] += [live_s(text, seed, stragglers, limit_s) for seed in SEEDS[1:]]
    runner_up = min(finalists - {advised}, key=lambda text: statistics.median(times_s[text]))
    for text in (advised, runner_up):
        times_s[text] += [live_s(text, seed, stragglers, limit_s) for seed in MORE_SEEDS]
    best_s = min(statistics.median(times_s[text]) for text in (advised, runner_up))
    for text in sorted(
        times_s, key=lambda text: (text != advised, statistics.median(times_s[text]))
    ):
        ratio = statistics.median(times_s[text]) / best_s
        is_advised = text == advised
        note = " (said to be alike with the next)" if is_advised and advice.are_alike else ""
        yield [
            f"{text}, advised{note}" if is_advised else text, _format_seconds(times_s[text]),
            f"{ratio:.2f}", f"<= {WANTED:g}" if is_advised else "",
            ("yes" if ratio <= WANTED else "no") if is_advised else "",
        ]  # fmt: skip


def live_s(text: str, seed: int, stragglers: dict[str, Any], limit_s: float) -> float:
    """Return the seconds until the target; inf if the limit came first."""
    with tempfile.TemporaryDirectory() as folder:
        run_in(
            Path(folder), "softmax", workers=WORKERS, protocol=text, path="store",
            mini_batch_size=MINI_BATCH, lr=LEARNING_RATE, seed=seed, seconds=limit_s, **stragglers,
        )  # fmt: skip
        return reached_s(records_of(Path(folder)))


def reached_s(records: list[Record]) -> float:
    """Return when the mean loss of the pushes of the last fifth first reached the target."""
    start_s = first_grant_s(records)
    window: deque[tuple[float, float]] = deque()
    total = 0.0
    for record in records:
        if isinstance(record, Handed):
            now_s = record.fact.at_s - start_s
            window.append((now_s, record.fact.loss))
            total += record.fact.loss
            while window[0][0] < (1.0 - LAST_SHARE) * now_s:
                total -= window.popleft()[1]
            if len(window) >= MIN_PUSHES and total / len(window) <= TARGET:
                return now_s
    return math.inf


def _format_seconds(times_s: list[float]) -> str:
    median = f"{statistics.median(times_s):.1f}"
    if len(times_s) == 1:
        return f"{median} (one run)"
    return f"{median} ({min(times_s):.1f} to {max(times_s):.1f}, {len(times_s)} runs)"


if __name__ == "__main__":
    main()
