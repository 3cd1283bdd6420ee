"""Predicted beside live: seconds an update, and the loss at set times.

    python bench/prediction.py [--write] [--only exp|shifted|pareto|loss]

exp, shifted, pareto   8 workers that compute nearly nothing and sleep X a mini-batch. One profile
           is taken under exp:50ms and k-batch-async:2; with its computing, exchange and cores the
           simulator predicts five protocols under each X: with the very draws of the live run
           (within 3 %), and with those of ten other seeds (within 5 % and two standard errors
           of the live run: its draws are a sample)
loss       LeNet, 2 workers, k-batch-async:2: mean training loss of the pushes of 10 equal spans
           of time, and of updates; 8 live runs, each with a profile taken just before it and a
           simulated run of the same seed that takes its times from there: within two standard
           errors of the difference, pair by pair. Past the plateau one figure a run counts

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
from quiet_runs import first_grant_s, point_task, records_of, run_alone, update_times_s
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
LOSS_SEEDS, LOSS_UPDATES, NUM_SPANS = range(1, 9), 900, 10
PROFILE_S = 20.0
"""As ``paceline plan`` takes it: longer than an epoch, after which there is a pause."""
PLATEAU, ROUNDING = 2.0, 1e-4
"""A loss that no run has at its beginning, where it is ln(10); what the last digit shown hides."""


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


Curve = list[tuple[float, int, float]]
"""Of each push: seconds since the first grant, the version it was computed at, its loss."""


def losses() -> Iterator[Row]:
    """By spans of time, by spans of updates, and in one figure a run from the plateau on."""
    live = {"workers": 2, "mini_batch_size": MINI_BATCH, "path": "store",
            "protocol": "k-batch-async:2"}  # fmt: skip
    pairs: list[tuple[Curve, Curve]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in LOSS_SEEDS:
            profile = run_alone(Path(folder) / f"profile-{seed}", "lenet", **live,
                                seconds=PROFILE_S, seed=100 + seed)  # fmt: skip
            given = {**live, "updates": LOSS_UPDATES, "seed": seed}
            place = run_alone(Path(folder) / f"live-{seed}", "lenet", **given)
            settings = resolve(given, env={}, is_call=True).settings
            simulated = Path(folder) / f"simulated-{seed}"
            rehearse("lenet", settings, World(like=profile, seed=seed), simulated)
            pairs.append((loss_curve(records_of(place)), loss_curve(records_of(simulated))))
    last_s = min(curve[-1][0] for pair in pairs for curve in pair)
    for column, last, unit in ((0, last_s, "s"), (1, float(LOSS_UPDATES), "updates")):
        borders = [last * i / NUM_SPANS for i in range(NUM_SPANS + 1)]
        spans = [span_means(pairs, column, *ends) for ends in pairwise(borders)]
        for (start, end), span in zip(pairwise(borders), spans, strict=True):
            name = f"{start:.2f} to {end:.2f} s" if unit == "s" else f"{start:.0f} to {end:.0f}"
            yield compared(f"{name}{' updates' if unit == 'updates' else ''}", span)
        past = [span for span in spans if is_past_plateau(span)]
        whole = [tuple(map(statistics.fmean, zip(*run, strict=True)))
                 for run in zip(*past, strict=True)]  # fmt: skip
        yield compared(f"past the plateau, by {unit}", [(one[0], one[1]) for one in whole])


def span_means(
    pairs: list[tuple[Curve, Curve]], column: int, start: float, end: float
) -> list[tuple[float, float]]:
    """Of each pair: the mean losses, live and simulated, of the pushes in this span."""

    def mean(curve: Curve) -> float:
        return statistics.fmean(one[2] for one in curve if start <= one[column] < end)

    return [(mean(live), mean(simulated)) for live, simulated in pairs]


def is_past_plateau(span: list[tuple[float, float]]) -> bool:
    """Whether live and simulated runs have left the loss that they began with, in the mean."""
    return all(statistics.fmean(losses) < PLATEAU for losses in zip(*span, strict=True))


def compared(name: str, rows: list[tuple[float, float]]) -> Row:
    """Live and simulated; the error is of the difference, pair by pair: spans of a run hang
    together, and pairs do not."""
    (live, error), (predicted, its_error) = (
        mean_and_own_error(list(one)) for one in zip(*rows, strict=True)
    )
    off, off_error = mean_and_own_error([simulated - measured for measured, simulated in rows])
    return [
        name, f"{live:.4f} +- {error:.4f}", f"{predicted:.4f} +- {its_error:.4f}",
        f"{off:+.4f} +- {off_error:.4f}", "", "", _word(abs(off) <= 2 * off_error + ROUNDING),
    ]  # fmt: skip


def loss_curve(records: list[Record]) -> Curve:
    start_s = first_grant_s(records)
    pushes = [one.fact for one in records if isinstance(one, Handed)]
    return [(one.at_s - start_s, one.ticket.version, one.loss) for one in pushes]


def mean_and_own_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _word(is_held: bool) -> str:
    return "yes" if is_held else "no"


if __name__ == "__main__":
    main()
