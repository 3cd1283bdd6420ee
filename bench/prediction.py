"""Predicted beside live: seconds an update, and the loss at set times.

    python bench/prediction.py [--write] [--only exp|shifted|pareto|loss]

exp, shifted, pareto   8 workers that compute nearly nothing and sleep X a mini-batch. One profile
           is taken under exp:50ms and k-batch-async:2; with its computing, exchange and cores the
           simulator predicts five protocols under each X: with the very draws of the live run
           (within 3 %), and with those of ten other seeds (within 5 % and two standard errors
           of the live run: its draws are a sample)
loss       LeNet, 2 workers, k-batch-async:2: mean training loss of the pushes of 10 equal spans
           of time, 5 live runs against 5 simulated ones of the same seeds, which take their
           times from a profile of another run: within two standard errors

All runs go through the store, since only there has every step a grant. Nothing is fitted: what the
simulator is given are a profile's trace and the seed. Workers that compute: bench/likely.py. Writes
results/prediction.md.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from paceline.config import resolve
from paceline.predict.rehearsal import rehearse
from paceline.predict.simulation import World
from paceline.protocols import parse
from paceline.simulation.timing import TimingRun
from paceline.trace.records import Handed, Record
from runs import first_grant_s, point_task, records_of, run_alone, update_times_s
from table import machine, write_table

Row = list[str]
SLEEPERS, NUM_BATCHES = 8, 20
DELAYS = {"exp": "exp:50ms", "shifted": "25ms+exp:25ms", "pareto": "pareto:2.5,30ms"}
SLEEPING = {"full-sync": 150, "k-sync:6": 300, "k-batch-sync:8": 300, "k-async:4": 400,
            "k-batch-async:4": 500}  # fmt: skip
"""Protocols, and updates of a live run."""
SAME_DRAWS, OTHER_DRAWS = 0.03, 0.05
OTHER_SEEDS = range(101, 111)
SEED, MINI_BATCH = 1, 64
LOSS_SEEDS, LOSS_UPDATES, NUM_SPANS = range(1, 6), 900, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=[*DELAYS, "loss"])
    options = parser.parse_args()
    note = machine()
    rows: list[Row] = []
    for name in (*DELAYS, "loss"):
        if options.only in (None, name):
            for row in losses() if name == "loss" else sleeping(name):
                rows.append([f"{name}: {row[0]}", *row[1:]])
                print(" | ".join(rows[-1]), flush=True)
    if options.write:
        header = ["what", "live", "predicted, same draws", "off", "other draws", "off", "reached"]
        write_table("prediction", "Predicted beside live", header, rows, f"ms an update; +- one "
                    f"standard error. {note}")  # fmt: skip


# -- seconds an update --------------------------------------------------------------------------


def sleeping(name: str) -> Iterator[Row]:
    task = point_task(1_000_000)
    live = {"workers": SLEEPERS, "mini_batch_size": 1, "path": "store"}
    with tempfile.TemporaryDirectory() as folder:
        profile = run_alone(Path(folder) / "profile", task, **live, protocol="k-batch-async:2",
                            delay=("exp:50ms",), updates=500, seed=77)  # fmt: skip
        for i, (text, num_updates) in enumerate(SLEEPING.items()):
            place = run_alone(Path(folder) / str(i), task, **live, protocol=text, seed=SEED,
                              delay=(DELAYS[name],), updates=num_updates)  # fmt: skip
            world = World(like=profile, delay=(DELAYS[name],), seed=SEED)
            yield beside(text, SLEEPERS, update_times_s(records_of(place)), world)


def beside(text: str, workers: int, live_s: list[float], world: World) -> Row:
    """One protocol: measured, and predicted with the same draws and with others."""
    mean_s, error_s = mean_and_error_s(live_s)
    same_s = predicted_s(text, workers, world, len(live_s))
    seeds = [World(like=world.like, delay=world.delay, seed=seed) for seed in OTHER_SEEDS]
    other_s = statistics.fmean(predicted_s(text, workers, one, len(live_s)) for one in seeds)
    off, off_other = same_s / mean_s - 1, other_s / mean_s - 1
    is_near = abs(off) <= SAME_DRAWS
    is_near_other = abs(off_other) <= OTHER_DRAWS + 2 * error_s / mean_s
    return [
        text, f"{1e3 * mean_s:.2f} +- {1e3 * error_s:.2f}", f"{1e3 * same_s:.2f}",
        f"{100 * off:+.1f} %", f"{1e3 * other_s:.2f}", f"{100 * off_other:+.1f} %",
        f"{_word(is_near)}, {_word(is_near_other)}",
    ]  # fmt: skip


def predicted_s(text: str, workers: int, world: World, num_updates: int) -> float:
    counts = TimingRun(parse(text, workers), world.conditions(workers)).run(num_updates)
    return mean_and_error_s(list(counts.times_s))[0]


def mean_and_error_s(times_s: list[float]) -> tuple[float, float]:
    """Mean seconds between updates after the first tenth, and its standard error."""
    kept = times_s[len(times_s) // 10 :]
    size = (len(kept) - 1) // NUM_BATCHES
    means = [(kept[(i + 1) * size] - kept[i * size]) / size for i in range(NUM_BATCHES)]
    error_s = statistics.stdev(means) / math.sqrt(NUM_BATCHES)
    return (kept[-1] - kept[0]) / (len(kept) - 1), error_s


# -- loss ---------------------------------------------------------------------------------------


def losses() -> Iterator[Row]:
    live = {"workers": 2, "mini_batch_size": MINI_BATCH, "path": "store",
            "protocol": "k-batch-async:2"}  # fmt: skip
    curves: dict[str, list[list[tuple[float, float]]]] = {"live": [], "simulated": []}
    with tempfile.TemporaryDirectory() as folder:
        profile = run_alone(Path(folder) / "profile", "lenet", **live, updates=400, seed=77)
        for seed in LOSS_SEEDS:
            place = run_alone(Path(folder) / f"live-{seed}", "lenet", **live,
                              updates=LOSS_UPDATES, seed=seed)  # fmt: skip
            curves["live"].append(loss_curve(records_of(place)))
        for seed in LOSS_SEEDS:
            given = {**live, "updates": LOSS_UPDATES, "seed": seed}
            settings = resolve(given, env={}, is_call=True).settings
            place = Path(folder) / f"simulated-{seed}"
            rehearse("lenet", settings, World(like=profile, seed=seed), place)
            curves["simulated"].append(loss_curve(records_of(place)))
    last_s = min(curve[-1][0] for kind in curves.values() for curve in kind)
    borders_s = [last_s * i / NUM_SPANS for i in range(NUM_SPANS + 1)]
    for from_s, until_s in pairwise(borders_s):
        rows = {kind: [_mean(one, from_s, until_s) for one in curves[kind]] for kind in curves}
        (mean, error), (predicted, its_error) = (_mean_and_error(rows[kind]) for kind in curves)
        allowed = 2 * math.hypot(error, its_error)
        yield [
            f"{from_s:.2f} to {until_s:.2f} s", f"{mean:.4f} +- {error:.4f}",
            f"{predicted:.4f} +- {its_error:.4f}", f"{predicted - mean:+.4f}", "", "",
            _word(abs(predicted - mean) <= allowed),
        ]  # fmt: skip


def loss_curve(records: list[Record]) -> list[tuple[float, float]]:
    """Seconds since the first grant, and the loss, of each push."""
    start_s = first_grant_s(records)
    pushes = [one.fact for one in records if isinstance(one, Handed)]
    return [(one.at_s - start_s, one.loss) for one in pushes]


def _mean(curve: list[tuple[float, float]], from_s: float, until_s: float) -> float:
    return statistics.fmean(loss for at_s, loss in curve if from_s < at_s <= until_s)


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _word(is_held: bool) -> str:
    return "yes" if is_held else "no"


if __name__ == "__main__":
    main()
