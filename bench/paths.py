"""The faster path, by the number of workers: between peers, or through the store.

    python bench/paths.py [--workers 2 8 64 200] [--pairs 3] [--write]

full-sync on all cores, with a task that computes almost nothing (a point) and with LeNet: the cost
of the paths themselves, and what remains of it beside computing. Both paths in turn; seconds an
update from the first grant to the last update. `auto` has to choose the faster one, wherever they
differ by more than the runs of one path. Writes results/paths.md.
"""

import argparse
import statistics
from typing import Any

from paceline.config import resolve
from paceline.protocols import parse
from paceline.run.collective import path_of
from quiet_runs import first_grant_s, point_task, run, update_times_s
from table import machine, spread, write_table

PATHS = ("peers", "store")
TASKS: dict[str, Any] = {"point": (point_task(1_000_000), 1), "lenet": ("lenet", 4)}
"""Name -> task and mini-batch."""
UPDATES = {2: 300, 8: 150, 64: 40, 200: 20}
MOST = 1.05
"""Largest ratio of the chosen path to the other: less is the machine's noise."""


def update_ms(task: str, workers: int, path: str) -> float:
    program, mini_batch = TASKS[task]
    records = run(
        program, workers=workers, protocol="full-sync", path=path, mini_batch_size=mini_batch,
        updates=UPDATES[workers],
    )  # fmt: skip
    times_s = update_times_s(records)
    return 1e3 * (times_s[-1] - first_grant_s(records)) / len(times_s)


def automatic_path(workers: int) -> str:
    settings = resolve({"workers": workers}, env={}, is_call=True).settings
    path = path_of(settings, parse("full-sync", workers))
    return "peers" if path == "auto" else path


def row(task: str, workers: int, pairs: int) -> list[str]:
    times: dict[str, list[float]] = {path: [] for path in PATHS}
    for number in range(pairs):
        for path in PATHS if number % 2 else reversed(PATHS):
            times[path].append(update_ms(task, workers, path))
    ratios = [a / b for a, b in zip(times["store"], times["peers"], strict=True)]
    chosen = automatic_path(workers)
    alternative = next(path for path in PATHS if path != chosen)
    ratio = statistics.median(times[chosen]) / statistics.median(times[alternative])
    return [
        task, str(workers), *(spread(times[path]) for path in PATHS), spread(ratios), chosen,
        "yes" if ratio <= MOST else "no",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="*", default=list(UPDATES))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, rows = machine(), []
    for workers in options.workers:
        for task in TASKS:
            rows.append(row(task, workers, options.pairs))
            print(" | ".join(rows[-1]), flush=True)
    if options.write:
        header = ["task", "workers", "between peers, ms an update", "through the store, ms",
                  "store : peers", "auto takes", f"it takes <= {MOST} of the other"]  # fmt: skip
        method = f"{options.pairs} runs of each in turn; median (least to most). {note}"
        write_table("paths", "Which path is faster", header, rows, method)


if __name__ == "__main__":
    main()
