"""Predicted against live: seconds an update, and the loss at set times.

    python bench/prediction.py [--write] [--only exp|shifted|pareto|loss]

exp, shifted, pareto   8 workers that compute almost nothing and sleep X a mini-batch. One profile
           is taken under exp:50ms and k-batch-async:2; with its computing, exchange and cores the
           simulator predicts five protocols under each X: with the same draws as the live run
           (within 3 %), and with those of ten other seeds (within 5 % and two standard errors
           of the live run: its draws are a sample)
loss       LeNet, 2 workers, k-batch-async:2: mean training loss of the pushes of 10 equal spans
           of time, and of updates; 8 live runs, each with a profile taken just before it and a
           simulated run of the same seed that uses the profile's times: within two standard
           errors of the difference, pair by pair. Past the plateau one figure a run counts

All runs go through the store, since only there every step has a grant. Nothing is fitted: the
simulator gets a profile's trace and the seed. For workers that compute see bench/likely.py. Writes
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
from quiet_runs import first_grant_s, point_task, records_of, run_alone, update_times_s
from table import machine, write_table

Row = list[str]
SLEEPERS, NUM_BATCHES = 8, 20
DELAYS = {"exp": "exp:50ms", "shifted": "25ms+exp:25ms", "pareto": "pareto:2.5,30ms"}
SLEEPING = {"full-sync": 150, "k-sync:6": 300, "k-batch-sync:8": 300, "k-async:4": 400,
            "k-batch-async:4": 500}  # fmt: skip
"""Protocol -> updates of a live run."""
SAME_DRAWS, OTHER_DRAWS = 0.03, 0.05
OTHER_SEEDS = range(101, 111)
SEED, MINI_BATCH = 1, 64
LOSS_SEEDS, LOSS_UPDATES, NUM_SPANS = range(1, 9), 900, 10
PROFILE_S = 20.0
"""As in ``paceline plan``: longer than an epoch, which ends with a pause."""
PLATEAU, ROUNDING = 2.0, 1e-4
"""A loss below the initial one, ln(10); the rounding error of the last digit shown."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=[*DELAYS, "loss"])
    options = parser.parse_args()
    note = machine()
    rows: list[Row] = []
    for name in (*DELAYS, "loss"):
        if options.only in (None, name):
            for row in loss_rows() if name == "loss" else sleeping_rows(name):
                rows.append([f"{name}: {row[0]}", *row[1:]])
                print(" | ".join(rows[-1]), flush=True)
    if options.write:
        header = ["what", "live", "predicted, same draws", "off", "other draws", "off", "reached"]
        write_table("prediction", "Predicted beside live", header, rows, f"ms an update; +- one "
                    f"standard error. {note}")  # fmt: skip


# -- seconds an update --------------------------------------------------------------------------


def sleeping_rows(name: str) -> Iterator[Row]:
    task = point_task(1_000_000)
    live = {"workers": SLEEPERS, "mini_batch_size": 1, "path": "store"}
    with tempfile.TemporaryDirectory() as folder:
        profile = run_alone(Path(folder) / "profile", task, **live, protocol="k-batch-async:2",
                            delay=("exp:50ms",), updates=500, seed=77)  # fmt: skip
        for i, (text, num_updates) in enumerate(SLEEPING.items()):
            run_dir = run_alone(Path(folder) / str(i), task, **live, protocol=text, seed=SEED,
                                delay=(DELAYS[name],), updates=num_updates)  # fmt: skip
            world = World(like=profile, delay=(DELAYS[name],), seed=SEED)
            yield protocol_row(text, SLEEPERS, update_times_s(records_of(run_dir)), world)


def protocol_row(text: str, workers: int, live_s: list[float], world: World) -> Row:
    """Compare one protocol, measured, and predicted with the same draws and with others."""
    mean_s, error_s = mean_gap_and_error_s(live_s)
    same_s = predicted_s(text, workers, world, len(live_s))
    seeds = [World(like=world.like, delay=world.delay, seed=seed) for seed in OTHER_SEEDS]
    other_s = statistics.fmean(predicted_s(text, workers, seeded, len(live_s)) for seeded in seeds)
    deviation, other_deviation = same_s / mean_s - 1, other_s / mean_s - 1
    is_same_near = abs(deviation) <= SAME_DRAWS
    is_other_near = abs(other_deviation) <= OTHER_DRAWS + 2 * error_s / mean_s
    return [
        text, f"{1e3 * mean_s:.2f} +- {1e3 * error_s:.2f}", f"{1e3 * same_s:.2f}",
        f"{100 * deviation:+.1f} %", f"{1e3 * other_s:.2f}", f"{100 * other_deviation:+.1f} %",
        f"{_yes_or_no(is_same_near)}, {_yes_or_no(is_other_near)}",
    ]  # fmt: skip


def predicted_s(text: str, workers: int, world: World, num_updates: int) -> float:
    counts = TimingRun(parse(text, workers), world.conditions(workers)).run(num_updates)
    return mean_gap_and_error_s(list(counts.times_s))[0]


def mean_gap_and_error_s(times_s: list[float]) -> tuple[float, float]:
    """Return the mean seconds between updates after the first tenth, and its standard error."""
    kept = times_s[len(times_s) // 10 :]
    size = (len(kept) - 1) // NUM_BATCHES
    means = [(kept[(i + 1) * size] - kept[i * size]) / size for i in range(NUM_BATCHES)]
    error_s = statistics.stdev(means) / math.sqrt(NUM_BATCHES)
    return (kept[-1] - kept[0]) / (len(kept) - 1), error_s


# -- loss ---------------------------------------------------------------------------------------


Curve = list[tuple[float, int, float]]
"""For each push: seconds since the first grant, the version of its parameters, its loss."""


def loss_rows() -> Iterator[Row]:
    """Compare losses by spans of time, by spans of updates, and by run past the plateau."""
    live = {"workers": 2, "mini_batch_size": MINI_BATCH, "path": "store",
            "protocol": "k-batch-async:2"}  # fmt: skip
    pairs: list[tuple[Curve, Curve]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in LOSS_SEEDS:
            profile = run_alone(Path(folder) / f"profile-{seed}", "lenet", **live,
                                seconds=PROFILE_S, seed=100 + seed)  # fmt: skip
            flags = {**live, "updates": LOSS_UPDATES, "seed": seed}
            run_dir = run_alone(Path(folder) / f"live-{seed}", "lenet", **flags)
            settings = resolve(flags, env={}, is_call=True).settings
            simulated = Path(folder) / f"simulated-{seed}"
            rehearse("lenet", settings, World(like=profile, seed=seed), simulated)
            pairs.append((loss_curve(records_of(run_dir)), loss_curve(records_of(simulated))))
    last_s = min(curve[-1][0] for pair in pairs for curve in pair)
    for column, last, unit in ((0, last_s, "s"), (1, float(LOSS_UPDATES), "updates")):
        borders = [last * i / NUM_SPANS for i in range(NUM_SPANS + 1)]
        spans = [span_means(pairs, column, *ends) for ends in pairwise(borders)]
        for (start, end), span in zip(pairwise(borders), spans, strict=True):
            name = f"{start:.2f} to {end:.2f} s" if unit == "s" else f"{start:.0f} to {end:.0f}"
            yield loss_row(f"{name}{' updates' if unit == 'updates' else ''}", span)
        later_spans = [span for span in spans if is_past_plateau(span)]
        run_means = [tuple(map(statistics.fmean, zip(*run, strict=True)))
                     for run in zip(*later_spans, strict=True)]  # fmt: skip
        yield loss_row(f"past the plateau, by {unit}", [(pair[0], pair[1]) for pair in run_means])


def span_means(
    pairs: list[tuple[Curve, Curve]], column: int, start: float, end: float
) -> list[tuple[float, float]]:
    """Return for each pair the mean losses, live and simulated, of the pushes in this span."""

    def mean(curve: Curve) -> float:
        return statistics.fmean(push[2] for push in curve if start <= push[column] < end)

    return [(mean(live), mean(simulated)) for live, simulated in pairs]


def is_past_plateau(span: list[tuple[float, float]]) -> bool:
    """Whether live and simulated runs have left their initial loss, in the mean."""
    return all(statistics.fmean(losses) < PLATEAU for losses in zip(*span, strict=True))


def loss_row(name: str, rows: list[tuple[float, float]]) -> Row:
    """Compare live and simulated losses. The error is of the difference, pair by pair: spans of a
    run are correlated, pairs are not."""
    (live, error), (predicted, predicted_error) = (
        mean_and_error(list(column)) for column in zip(*rows, strict=True)
    )
    difference, difference_error = mean_and_error(
        [simulated - measured for measured, simulated in rows]
    )
    return [
        name, f"{live:.4f} +- {error:.4f}", f"{predicted:.4f} +- {predicted_error:.4f}",
        f"{difference:+.4f} +- {difference_error:.4f}", "", "",
        _yes_or_no(abs(difference) <= 2 * difference_error + ROUNDING),
    ]  # fmt: skip


def loss_curve(records: list[Record]) -> Curve:
    start_s = first_grant_s(records)
    pushes = [record.fact for record in records if isinstance(record, Handed)]
    return [(push.at_s - start_s, push.ticket.version, push.loss) for push in pushes]


def mean_and_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _yes_or_no(is_true: bool) -> str:
    return "yes" if is_true else "no"


if __name__ == "__main__":
    main()
