"""What it costs a run without faults that it would survive them.

    python bench/calm.py [--seconds 90] [--write]

LeNet, batch 256, two workers, full-sync. One run saves a checkpoint every 3 s, many times as often as
anybody would, so that there are enough of them: what the updates of the second after each border
take longer than all others, together, is the cost of one; it is then held against the 30 s that lie
between two in earnest. Signs of life are counted, and timed by themselves. The 95 % interval is by
bootstrap over the checkpoints. Writes results/calm.md.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from paceline.store.control import Control, control_bytes
from paceline.store.memory import PrivateMemory
from paceline.sessions.lane import Lane
from paceline.sessions.mediated import MediatedSession
from runs import records_of, run_in, update_times_s
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
        times_s = update_times_s(records_of(run))
        borders = [
            json.loads((one / "run.json").read_text())["version"]
            for one in (run / "checkpoints").iterdir()
            if one.name.isdigit()
        ]
    update_s, costs_s = cost_of_each(times_s, sorted(borders))
    middle, low, high = mean_interval(costs_s)
    shares = [value / IN_EARNEST_S for value in (middle, low, high)]
    rows = [
        ["an update, ms", f"{1e3 * update_s:.1f}", ""],
        ["checkpoints", str(len(costs_s)), ""],
        ["one of them costs, ms", f"{1e3 * middle:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})", ""],
        ["of 30 s", f"{shares[0]:.2%} ({shares[1]:.2%} to {shares[2]:.2%})", f"<= {WANTED:.0%}"],
        ["a sign of life, us", f"{1e6 * beat_s():.2f}", ""],
    ]
    for row in rows:
        print(" | ".join(row))
    if options.write:
        header = ["what", "measured", "wanted"]
        write_table("calm", "What survival costs where nothing happens", header, rows, note)


def cost_of_each(times_s: list[float], borders: list[int]) -> tuple[float, list[float]]:
    """Usual seconds of an update, and for each checkpoint what the updates after it took longer."""
    gaps_s = [after - before for before, after in zip(times_s, times_s[1:], strict=False)]
    near: dict[int, list[float]] = {}
    is_near = [False] * len(gaps_s)
    for border in borders:
        at = border - 1  # gap i leads to update i + 2
        since_s, row = times_s[min(at, len(times_s) - 1)], []
        while at < len(gaps_s) and times_s[at] - since_s < LOOKED_S:
            row.append(gaps_s[at])
            is_near[at] = True
            at += 1
        if at < len(gaps_s):
            near[border] = row
    usual = [gap for gap, one in zip(gaps_s, is_near, strict=True) if not one]
    usual = [gap for gap in usual if gap < 10 * statistics.median(usual)]  # not between epochs
    update_s = statistics.fmean(usual)
    rows = [row for row in near.values() if max(row) < 10 * update_s]
    return update_s, [sum(row) - len(row) * update_s for row in rows]


def mean_interval(values: list[float]) -> tuple[float, float, float]:
    """The mean, and its 95 % interval."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(2000))
    return statistics.fmean(values), means[50], means[-51]


def beat_s() -> float:
    """Seconds of one sign of life, of which a step gives one for each layer, and one more."""
    control = Control(PrivateMemory(control_bytes(1)), 1)
    session = MediatedSession.__new__(MediatedSession)
    session._control, session._beats = control, control.beats[0]
    num = 200_000
    start_s = time.perf_counter()
    for _ in range(num):
        session.beat()
    return (time.perf_counter() - start_s) / num


if __name__ == "__main__":
    main()
