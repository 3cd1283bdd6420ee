"""What it costs a run without faults that it would survive them.

    python bench/calm.py [--seconds 90] [--write]

LeNet, batch 256, two workers, full-sync. One run saves a checkpoint every 3 s, many times as often
as anybody would, so that there are enough of them: what the updates of the second after each border
take longer than all others, together, is the cost of one; it is then held against the 30 s that lie
between two in earnest. Borders with less than a second to the end of their epoch are left out. A
sign of life, of which a step gives a few, is timed by itself. The 95 % interval is by bootstrap
over the checkpoints. Writes results/calm.md.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from paceline.events import Apply, EpochEnd
from paceline.exchange.member import MemberSide
from paceline.store.control import Control, control_bytes
from paceline.store.memory import PrivateMemory
from paceline.trace.records import Ordered, Record
from runs import records_of, run_in
from table import machine, write_table

EVERY_S, IN_EARNEST_S, LOOKED_S = 3, 30.0, 1.0
WANTED = 0.01


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        run_in(run, "lenet", workers=2, batch_size=256, seconds=options.seconds, epochs=1000,
               checkpoint_every=f"{EVERY_S}s", keep=1000, respawn=True, device="cpu")  # fmt: skip
        epochs_s = times_by_epoch(records_of(run))
        borders = [
            json.loads((one / "run.json").read_text())["version"]
            for one in (run / "checkpoints").iterdir()
            if one.name.isdigit()
        ]
    update_s, costs_s = cost_of_each(epochs_s, sorted(borders))
    middle, low, high = mean_interval(costs_s)
    shares = [value / IN_EARNEST_S for value in (middle, low, high)]
    rows = [
        ["an update, ms", f"{1e3 * update_s:.1f}", ""],
        ["checkpoints", str(len(costs_s)), ""],
        ["one of them costs, ms", f"{1e3 * middle:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})", ""],
        ["of 30 s", f"{shares[0]:.2%} ({shares[1]:.2%} to {shares[2]:.2%})",
         f"<= {WANTED:.0%}: {'yes' if shares[2] <= WANTED else 'no'}"],
        ["a sign of life, us", f"{1e6 * beat_s():.2f}", ""],
    ]  # fmt: skip
    for row in rows:
        print(" | ".join(row))
    if options.write:
        header = ["what", "measured", "wanted"]
        write_table("calm", "What survival costs where nothing happens", header, rows, note)


def times_by_epoch(records: list[Record]) -> list[list[float]]:
    """When each update was made, epoch by epoch."""
    epochs: list[list[float]] = [[]]
    for one in records:
        if isinstance(one, Ordered) and isinstance(one.order, Apply):
            epochs[-1].append(one.t_s)
        elif isinstance(one, Ordered) and isinstance(one.order, EpochEnd):
            epochs.append([])
    return epochs


def cost_of_each(epochs_s: list[list[float]], borders: list[int]) -> tuple[float, list[float]]:
    """Usual seconds of an update, and for each checkpoint what the updates after it took longer.

    Args:
        borders: versions at which checkpoints were taken; version v is made by update v.
    """
    usual, near = list[float](), list[list[float]]()
    first = 1  # the version that the epoch's first update makes
    for times_s in epochs_s:
        inside = [border - first for border in borders if first <= border < first + len(times_s)]
        until = 0
        for at in inside:
            stop = next((i for i in range(at, len(times_s))
                         if times_s[i] - times_s[at] >= LOOKED_S), None)  # fmt: skip
            usual += gaps_of(times_s[until : at + 1])
            until = len(times_s) if stop is None else stop
            if stop is not None:
                near.append(gaps_of(times_s[at : stop + 1]))
        usual += gaps_of(times_s[until:])
        first += len(times_s)
    update_s = statistics.fmean(usual)
    return update_s, [sum(row) - len(row) * update_s for row in near]


def gaps_of(times_s: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times_s)]


def mean_interval(values: list[float]) -> tuple[float, float, float]:
    """The mean, and its 95 % interval."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(2000))
    return statistics.fmean(values), means[50], means[-51]


def beat_s() -> float:
    """Seconds of one sign of life, of which a step gives one for each layer, and one more."""
    control = Control(PrivateMemory(control_bytes(1)), 1)
    member = MemberSide.__new__(MemberSide)
    member.control, member._beats = control, control.beats[0]
    num = 200_000
    start_s = time.perf_counter()
    for _ in range(num):
        member.beat()
    return (time.perf_counter() - start_s) / num


if __name__ == "__main__":
    main()
