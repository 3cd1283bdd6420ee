"""Goodput: the updates that are left of a run whose workers are killed and stopped all the time.

    python bench/goodput.py [--minutes 10] [--only PROTOCOL ...] [--write]

Eight workers whose steps wait 200 ms, so that two cores carry them, with ``--respawn``; 62 faults
in ten minutes (fewer in fewer), three quarters of them ``kill -9``, the others stops of 5 s. The
same run without faults goes beside it, at the same time on the same cores. Goodput is raw: its
updates over those, both from the first step on; nothing is credited for new lives.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from havoc_run import left_behind
from paceline.events import Apply, EpochEnd, Grant, Joined
from paceline.trace import FILE_NAME, read_trace
from paceline.trace.records import Heard, Ordered, Record, Struck
from table import machine, write_table

WORKERS = 8
PROTOCOLS = ("k-sync:6", "k-batch-async:8", "full-sync")
WANTED = {"k-sync:6": 0.977, "k-batch-async:8": 0.977}
FAULTS_PER_MINUTE, KILLS = 6.2, 0.75
STOP_S = 5.0
BACK_S = 3.0
"""How long a killed worker is taken to be impaired when the plan is drawn."""
MOST_IMPAIRED = 2
SCRIPT = """
import time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.ones(400_000, 8), torch.ones(400_000, 1))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=16))
for epoch in pace.epochs(1):
    for inputs, targets in loader:
        with pace.step():
            time.sleep(0.2)
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
"""
HEADER = (
    "protocol", "updates a second without faults", "with faults", "goodput", "wanted",
    "faults fired", "kill to new life, s (median, most)", "kill to next update, s (median, most)",
    "each sample once", "left behind",
)  # fmt: skip
NOTE = (
    "Both runs at the same time; updates from the first step on, for as long as both went. A stop "
    "lasts 5 s where nobody ends the worker before: one that the others wait for is ended after 3 "
    "usual steps, and replaced. Left behind are processes, whoever their parent is, files, and "
    "names in /dev/shm."
)


def draw_plan(seconds: float, num_faults: int, seed: int) -> list[str]:
    """Faults at random moments, never more than two workers impaired at once."""
    rng = random.Random(seed)
    kinds = ["kill"] * round(num_faults * KILLS)
    kinds += ["stop"] * (num_faults - len(kinds))
    lasts_s = {"kill": BACK_S, "stop": STOP_S}
    rng.shuffle(kinds)
    impaired: list[tuple[float, float, int]] = []
    lines = []
    for kind in sorted(kinds, key=lambda kind: -lasts_s[kind]):  # the longest are placed first
        while True:
            start_s = rng.uniform(2.0, seconds - lasts_s[kind] - 2.0)
            stop_s = start_s + lasts_s[kind]
            meanwhile = [one for one in impaired if one[0] < stop_s and start_s < one[1]]
            if len(meanwhile) < MOST_IMPAIRED:
                break
        busy = {one[2] for one in meanwhile}
        worker = rng.choice([one for one in range(WORKERS) if one not in busy])
        impaired.append((start_s, stop_s, worker))
        lasting = f" for {STOP_S:g}s" if kind == "stop" else ""
        lines.append(f"{kind} worker {worker} at {start_s:.3f}s{lasting}")
    return lines


def launch(folder: Path, protocol: str, seconds: float, faults: list[str]) -> subprocess.Popen[str]:
    """Begin a run of so many seconds."""
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable, "-m", "paceline", "launch", "--workers", str(WORKERS), "--protocol",
        protocol, "--device", "cpu", "--threads", "1", "--seconds", str(seconds), "--respawn",
        "--checkpoint-every", "never", "--run-dir", "run",
        *(word for fault in faults for word in ("--fault", fault)), "train.py",
    ]  # fmt: skip
    screen, scratch = (folder / "screen").open("w"), folder / "tmp"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    return subprocess.Popen(
        command, cwd=folder, stdout=screen, stderr=screen, text=True, env=environment
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A struck run as its trace tells it."""

    num_struck: int
    back_s: list[float]
    """From the kill of each worker to the first step of its next life."""
    gaps_s: list[float]
    """From each kill to the next update."""
    is_exact: bool
    left: tuple[str, ...]
    """Processes, files and names in /dev/shm that are there afterwards."""


def outcome(records: list[Record], left: tuple[str, ...]) -> Outcome:
    """What came of a run."""
    ordered = [one for one in records if isinstance(one, Ordered)]
    times = [one.t_s for one in ordered if isinstance(one.order, Apply)]
    struck = [one for one in records if isinstance(one, Struck)]
    kills = [one for one in struck if one.text.startswith("kill")]
    return Outcome(
        num_struck=len(struck),
        back_s=_back(records, kills),
        gaps_s=[min((t for t in times if t > one.t_s), default=one.t_s) - one.t_s for one in kills],
        is_exact=_is_exact(ordered),
        left=left,
    )


def _is_exact(ordered: list[Ordered]) -> bool:
    """Whether each whole epoch used each of its samples exactly once, and no other one twice."""
    leases: dict[tuple[int, int], Any] = {}
    used: dict[int, Counter[int]] = {}
    whole = []
    for one in ordered:
        if isinstance(one.order, Grant):
            leases[one.order.ticket[:2]] = one.order.leases
        elif isinstance(one.order, Apply):
            for ticket in one.order.tickets:
                for lease in leases[ticket[:2]]:
                    used.setdefault(lease.epoch, Counter()).update(range(lease.start, lease.stop))
        elif isinstance(one.order, EpochEnd):
            whole.append(one.order.epoch)
    once = all(set(counts.values()) == {1} for counts in used.values())
    return once and all(len(used[epoch]) == max(used[epoch]) + 1 for epoch in whole)


def _back(records: list[Record], kills: list[Struck]) -> list[float]:
    """Seconds from each kill to the next life's joining."""
    joined = [
        (one.worker, one.fact.at_s)
        for one in records
        if isinstance(one, Heard) and isinstance(one.fact, Joined)
    ]
    times = []
    for kill in kills:
        worker = int(kill.text.split()[2])
        later = [at_s for seat, at_s in joined if seat == worker and at_s > kill.t_s]
        if later:
            times.append(min(later) - kill.t_s)
    return times


def updates_within(records: list[Record], seconds: float) -> int:
    """How many updates were made so long from the first grant on."""
    ordered = [one for one in records if isinstance(one, Ordered)]
    first_s = next(one.t_s for one in ordered if isinstance(one.order, Grant))
    applied = [one.t_s for one in ordered if isinstance(one.order, Apply)]
    return sum(t_s - first_s <= seconds for t_s in applied)


def measure(protocol: str, seconds: float, faults: list[str]) -> tuple[int, int, Outcome]:
    """Updates without faults and with them, and more of the latter run."""
    named = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        for name, plan in (("calm", []), ("struck", faults)):
            folder = Path(scratch) / name
            folder.mkdir()
            runs.append((folder, launch(folder, protocol, seconds, plan)))
        found = []
        for folder, process in runs:
            if process.wait(seconds + 120.0):
                sys.exit((folder / "screen").read_text())
            found.append(list(read_trace(folder / "run" / FILE_NAME)))
        left = [*left_behind(runs[1][0] / "tmp"), *set(os.listdir("/dev/shm")) - named]
        calm, struck = (updates_within(records, seconds) for records in found)
        return calm, struck, outcome(found[1], tuple(left))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", default=PROTOCOLS, choices=PROTOCOLS)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    seconds, where = 60.0 * arguments.minutes, machine()
    num_faults = round(FAULTS_PER_MINUTE * arguments.minutes)
    plan = draw_plan(seconds, num_faults, arguments.seed)
    rows, is_well = [], True
    for protocol in arguments.only:
        calm, struck, found = measure(protocol, seconds, plan)
        goodput, wanted = struck / calm, WANTED.get(protocol, 0.0)
        is_well &= goodput >= wanted and found.is_exact and not found.left
        row = (
            protocol, f"{calm / seconds:.2f}", f"{struck / seconds:.2f}", f"{goodput:.1%}",
            f">= {wanted:.1%}" if wanted else "reported", f"{found.num_struck} of {len(plan)}",
            _spread(found.back_s), _spread(found.gaps_s), "yes" if found.is_exact else "NO",
            ", ".join(found.left) or "nothing",
        )  # fmt: skip
        rows.append(row)
        print(" | ".join(row), flush=True)
    if arguments.write:
        title = f"Goodput: {len(plan)} kills and stops in {arguments.minutes:g} minutes"
        write_table("goodput", title, HEADER, rows, f"{NOTE} {where}.")
    sys.exit(not is_well)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}, {max(values):.2f}" if values else "-"


if __name__ == "__main__":
    main()
