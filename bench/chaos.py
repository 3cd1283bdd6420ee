"""Chaos: eight workers, kills, stops and slow phases at random, and what is left of the pace.

    python bench/chaos.py [--seconds 600] [--faults 62] [--write]

Steps are dominated by a sleep of 100 ms, with real LeNet gradients on Fashion-MNIST. In 10 minutes
there are 62 faults: 27 `kill -9`, 20 stops of 5 s, 15 phases of 10 s at a tenth of the speed; never
more than two workers are impaired at once; dead workers are replaced. Fewer seconds get as many
fewer faults. The useful throughput (samples in updates, a second) is held against that of runs
without faults just before and after, in the worker-time that the faults leave: the injected stop
seconds and nine tenths of the injected slow seconds are taken off, detection and new lives are not.
"""

import argparse
import io
import os
import random
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from paceline.config import RunSettings
from paceline.events import Apply, EpochEnd, Grant, Joined
from paceline.launch import launcher
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.trace import read_trace
from paceline.trace.records import Heard, Ordered, Record, Struck
from paceline.workloads import load_task
from table import machine, write_table

WORKERS = 8
MINI_BATCH = 2
DELAY = "97ms"
STOP_S, SLOW_S, FACTOR = 5.0, 10.0, 10.0
BACK_S = 3.0
"""How long a killed worker is taken to be impaired when the plan is drawn."""
MOST_IMPAIRED = 2
PROTOCOLS = ("k-batch-async:8", "k-sync:6", "full-sync")
"""The first against the worker-time that is left, the second against the whole."""
HEADER = (
    "protocol", "samples a second without faults, before and after", "with faults", "of the whole",
    "of the worker-time left", "wanted", "faults fired", "kill to new life (median)",
    "kill to next update (median, most)", "each sample once", "left behind",
)  # fmt: skip
NOTE = (
    "Kills, stops of 5 s and phases of 10 s at a tenth of the speed, as 27 : 20 : 15, at random "
    "moments, never more than two workers impaired at once; dead workers are replaced. The "
    "worker-time left is all but the injected stop seconds and nine tenths of the injected slow "
    "seconds: detection and new lives are not taken off. Left behind: processes and names in "
    "/dev/shm."
)
WANTED = {"k-batch-async:8": 0.977, "k-sync:6": 0.977}


def draw_plan(
    seconds: float, num_faults: int, seed: int, kills: float = 27 / 62, stops: float = 20 / 62
) -> list[str]:
    """Faults at random moments, never more than two workers impaired at once.

    Args:
        kills, stops: shares of the faults; the others are slow phases.
    """
    rng = random.Random(seed)
    kinds = ["kill"] * round(num_faults * kills) + ["stop"] * round(num_faults * stops)
    kinds += ["slow"] * (num_faults - len(kinds))
    lasts = {"kill": BACK_S, "stop": STOP_S, "slow": SLOW_S}
    rng.shuffle(kinds)
    impaired: list[tuple[float, float, int]] = []
    lines = []
    for kind in sorted(kinds, key=lambda one: -lasts[one]):  # the longest find room first
        while True:
            start = rng.uniform(2.0, seconds - lasts[kind] - 2.0)
            stop = start + lasts[kind]
            meanwhile = [one for one in impaired if one[0] < stop and start < one[1]]
            busy = {one[2] for one in meanwhile}
            if len(meanwhile) < MOST_IMPAIRED:
                break
        worker = rng.choice([one for one in range(WORKERS) if one not in busy])
        impaired.append((start, stop, worker))
        how = {"kill": "", "stop": f" for {STOP_S:g}s", "slow": f" for {SLOW_S:g}s by {FACTOR:g}x"}
        lines.append(f"{kind} worker {worker} at {start:.3f}s{how[kind]}")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run as its trace tells it."""

    samples_per_s: float
    seconds: float
    num_struck: int
    lost_s: float
    back_s: list[float]
    """From the kill of each worker to the first step of its next life."""
    gaps_s: list[float]
    """From each kill to the next update."""
    is_exact: bool
    num_left: int
    """Processes and names in /dev/shm that are there afterwards and were not before."""


def run(protocol: str, seconds: float, faults: list[str], folder: Path) -> Outcome:
    """Train for so long under these faults."""
    lenet = load_task("lenet", WORKERS)
    task = replace(lenet, data=lambda: replace(lenet.data(), test=None), epochs=1000)
    before = _there()
    chosen = RunSettings(
        run_dir=str(folder), workers=WORKERS, protocol=protocol, mini_batch_size=MINI_BATCH,
        device="cpu", threads=1, delay=(DELAY,), seconds=seconds, fault=tuple(faults),
        respawn=True, lr=0.05,
    )  # fmt: skip
    launcher.launch_run(TaskProgram(task=task), chosen, QuietObserver(io.StringIO()))
    records = list(read_trace(folder / "trace.jsonl"))
    return outcome(records, len(_there() - before), faults)


def _there() -> set[str]:
    """Processes of ours and shared memory that has a name."""
    children = {f"process {one.pid}" for one in psutil.Process().children(recursive=True)}
    return children | {f"segment {name}" for name in os.listdir("/dev/shm")}


def outcome(records: list[Record], num_left: int, faults: list[str]) -> Outcome:
    """What came of a run, from its trace."""
    updates = [one for one in records if isinstance(one, Ordered) and isinstance(one.order, Apply)]
    struck = [one for one in records if isinstance(one, Struck)]
    samples, exact = _used(records)
    first_s, last_s = updates[0].t_s, updates[-1].t_s
    kills = [one for one in struck if one.text.startswith("kill")]
    lost_s = sum(STOP_S for one in struck if one.text.startswith("stop"))
    lost_s += sum(SLOW_S * (1 - 1 / FACTOR) for one in struck if one.text.startswith("slow"))
    times = [one.t_s for one in updates]
    return Outcome(
        samples_per_s=samples / (last_s - first_s),
        seconds=last_s - first_s,
        num_struck=len(struck),
        lost_s=lost_s,
        back_s=_back(records, kills),
        gaps_s=[min((t for t in times if t > one.t_s), default=one.t_s) - one.t_s for one in kills],
        is_exact=exact,
        num_left=num_left,
    )


def _used(records: list[Record]) -> tuple[int, bool]:
    """Samples in updates, and whether each whole epoch used each of its samples exactly once."""
    leases: dict[tuple[int, int], Any] = {}
    used: dict[int, Counter[int]] = {}
    whole = []
    for one in records:
        if not isinstance(one, Ordered):
            continue
        if isinstance(one.order, Grant):
            leases[one.order.ticket[:2]] = one.order.leases
        elif isinstance(one.order, Apply):
            for ticket in one.order.tickets:
                for lease in leases[ticket[:2]]:
                    used.setdefault(lease.epoch, Counter()).update(range(lease.start, lease.stop))
        elif isinstance(one.order, EpochEnd):
            whole.append(one.order.epoch)
    once = all(set(counts.values()) == {1} for counts in used.values())
    exact = once and all(len(used[epoch]) == max(used[epoch]) + 1 for epoch in whole)
    return sum(sum(counts.values()) for counts in used.values()), exact


def _back(records: list[Record], kills: list[Struck]) -> list[float]:
    """Seconds from each kill to the next life's joining."""
    joined = [(one.worker, one.fact.at_s) for one in records if _is(one, Joined)]  # type: ignore[union-attr]
    times = []
    for kill in kills:
        worker = int(kill.text.split()[2])
        later = [at_s for seat, at_s in joined if seat == worker and at_s > kill.t_s]
        if later:
            times.append(min(later) - kill.t_s)
    return times


def _is(record: Record, kind: type) -> bool:
    return isinstance(record, Heard) and isinstance(record.fact, kind)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--faults", type=int, default=None)
    parser.add_argument("--only", nargs="*", default=PROTOCOLS, choices=PROTOCOLS)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    seconds = arguments.seconds
    num_faults = arguments.faults or round(62 * seconds / 600)
    plan = draw_plan(seconds, num_faults, seed=4)
    rows, where = [], machine()
    for protocol in PROTOCOLS:
        if protocol not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            calm_s = max(20.0, seconds / 10)
            before = run(protocol, calm_s, [], Path(scratch) / "before")
            chaos = run(protocol, seconds, plan, Path(scratch) / "chaos")
            after = run(protocol, calm_s, [], Path(scratch) / "after")
        calm_per_s = (before.samples_per_s + after.samples_per_s) / 2
        raw = chaos.samples_per_s / calm_per_s
        left = 1.0 - chaos.lost_s / (WORKERS * chaos.seconds)
        row = (
            protocol, f"{before.samples_per_s:.0f} and {after.samples_per_s:.0f}",
            f"{chaos.samples_per_s:.0f}",
            f"{raw:.1%}", f"{raw / left:.1%}", _wanted(protocol),
            f"{chaos.num_struck} of {len(plan)}", f"{statistics.median(chaos.back_s):.2f} s",
            f"{statistics.median(chaos.gaps_s):.2f} s, {max(chaos.gaps_s):.2f} s",
            "yes" if chaos.is_exact else "NO", str(chaos.num_left),
        )  # fmt: skip
        rows.append(row)
        print(" | ".join(row), flush=True)
    if arguments.write:
        title = f"Chaos: {len(plan)} faults in {seconds:g} s, {WORKERS} workers"
        write_table("chaos", title, HEADER, rows, f"{NOTE} {where}.")


def _wanted(protocol: str) -> str:
    if protocol not in WANTED:
        return "reported"
    of = "the whole" if protocol.startswith("k-sync") else "the time left"
    return f">= {WANTED[protocol]:.1%} of {of}"


if __name__ == "__main__":
    main()
