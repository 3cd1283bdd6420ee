"""What ``plan`` says of LeNet with 2 to 8 workers on this machine, and what then happens.

    python bench/advice.py [--only 8] [--write]

For each number of workers ``plan`` takes its profile, as from the command line with ``--cores``.
With 2, 4 and 8 workers the advised protocol and two others, full-sync and async or what comes next
in plan's order, run live right after: predicted time an update beside the measured, evaluations
between epochs left out.
Mini-batches of 64; all through the store. Writes results/advice.md.
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
from prediction import mean_and_error_s
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
            for row in planned(workers, Path(folder)):
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


def planned(workers: int, folder: Path) -> Iterator[Row]:
    """The advised protocol first."""
    with chdir(folder):  # where the run of its profile goes
        advice = advise(
            Question(task="lenet", workers=workers, cores=num_cores(), race_s=RACE_S,
                     mini_batch_size=MINI_BATCH, seed=SEED)
        )  # fmt: skip
    forecasts = {one.forecast.protocol: one.forecast for one in advice.candidates}
    for text in chosen(advice) if workers in LIVE else (advice.advised,):
        predicted_s = forecasts[text].time_per_update_s
        name = f"{text}, advised" if text == advice.advised else text
        row = [str(workers), name, f"{1e3 * predicted_s:.2f}"]
        if workers not in LIVE:
            yield [*row, "", ""]
            continue
        place = run_alone(folder / f"{workers}-{text}".replace(":", "-"), "lenet", workers=workers,
                          path="store", protocol=text, mini_batch_size=MINI_BATCH, seed=SEED,
                          updates=max(100, round(RUN_S / predicted_s)))  # fmt: skip
        gaps_s = update_gaps_s(records_of(place))
        live_s, error_s = mean_and_error_s([*accumulate(gaps_s)])
        off = predicted_s / live_s - 1
        yield [*row, f"{1e3 * live_s:.2f} +- {1e3 * error_s:.2f}", f"{100 * off:+.1f} %"]


def chosen(advice: Advice) -> list[str]:
    """The advised one and two others."""
    order = [one.forecast.protocol for one in advice.candidates]
    wanted = list(dict.fromkeys([order[0], "full-sync", "async", *order]))
    return wanted[:3]


if __name__ == "__main__":
    main()
