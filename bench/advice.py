"""The advice of ``plan`` for LeNet with 2 to 8 workers on this machine, against live runs.

    python bench/advice.py [--only 8] [--write]

For each number of workers ``plan`` takes its profile, as from the command line with ``--cores``.
With 2, 4 and 8 workers the advised protocol and two others, full-sync and async or the next in
plan's order, run live right after: predicted time an update against the measured, without the
evaluations between epochs. Mini-batches of 64; all through the store. Writes results/advice.md.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from itertools import accumulate
from pathlib import Path

from paceline.predict.advice import Question, advise
from paceline.report.ranking import Advice
from paceline.system.processors import num_cores
from prediction import mean_gap_and_error_s
from quiet_runs import records_of, run_alone, update_gaps_s
from table import machine, write_table

Row = list[str]
WORKERS, LIVE = range(2, 9), (2, 4, 8)
MINI_BATCH, SEED = 64, 1
RACE_S, RUN_S = 15.0, 20.0
NOTE = (
    "Of one number of workers all are predicted from one profile and run after it: what they are "
    "off by together is what the machine became slower or faster meanwhile. That a worker that is "
    "called off first comes to the end of its operation is not in the prediction."
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", type=int, nargs="*", default=WORKERS)
    options = parser.parse_args()
    note = machine()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for workers in options.only:
            for row in advice_rows(workers, Path(folder)):
                rows.append(row)
                print(" | ".join(row), flush=True)
    if options.write:
        header = [
            "workers",
            "protocol",
            "predicted ms an update",
            "live ms an update",
            "off",
        ]
        title = "What plan says of LeNet, and what happens"
        write_table("advice", title, header, rows, f"{NOTE} {note}")


def advice_rows(workers: int, folder: Path) -> Iterator[Row]:
    """Compare the advised protocol, which comes first, and others with live runs."""
    with chdir(folder):  # the folder of its profile's run
        advice = advise(
            Question(task="lenet", workers=workers, cores=num_cores(), race_s=RACE_S,
                     mini_batch_size=MINI_BATCH, seed=SEED)
        )  # fmt: skip
    forecasts = {candidate.forecast.protocol: candidate.forecast for candidate in advice.candidates}
    for text in live_protocols(advice) if workers in LIVE else (advice.advised,):
        predicted_s = forecasts[text].time_per_update_s
        name = f"{text}, advised" if text == advice.advised else text
        row = [str(workers), name, f"{1e3 * predicted_s:.2f}"]
        if workers not in LIVE:
            yield [*row, "", ""]
            continue
        run_dir = run_alone(
            folder / f"{workers}-{text}".replace(":", "-"), "lenet", workers=workers, path="store",
            protocol=text, mini_batch_size=MINI_BATCH, seed=SEED,
            updates=max(100, round(RUN_S / predicted_s)),
        )  # fmt: skip
        gaps_s = update_gaps_s(records_of(run_dir))
        live_s, error_s = mean_gap_and_error_s([*accumulate(gaps_s)])
        deviation = predicted_s / live_s - 1
        yield [*row, f"{1e3 * live_s:.2f} +- {1e3 * error_s:.2f}", f"{100 * deviation:+.1f} %"]


def live_protocols(advice: Advice) -> list[str]:
    """Return the advised protocol and two others."""
    order = [candidate.forecast.protocol for candidate in advice.candidates]
    protocols = list(dict.fromkeys([order[0], "full-sync", "async", *order]))
    return protocols[:3]


if __name__ == "__main__":
    main()
