"""Goodput: the share of updates left of a run whose workers are killed and stopped all the time.

    python bench/goodput.py [--minutes 10] [--only PROTOCOL ...] [--write]

Eight workers whose steps wait 200 ms, so that two cores suffice, with ``--respawn``; 62 faults in
ten minutes (in proportion in fewer), three quarters of them ``kill -9``, the others stops of 5 s.
The same run without faults goes before it and after it. Goodput is raw: the updates of the run with
faults over the mean of the two without, all from the first step on, without credit for new lives.
"""

import argparse
import math
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
"""Seconds for which the plan treats a killed worker as impaired."""
MAX_IMPAIRED = 2
NUM_SAMPLES = 2_000
SCRIPT = f"""
import time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.ones({NUM_SAMPLES}, 8), torch.ones({NUM_SAMPLES}, 1))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=16))
for epoch in pace.epochs(1_000_000):
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
    "A run with faults, and one without before it and after it; updates from the first step on. "
    f"Each sample once: in each of its whole epochs, of {NUM_SAMPLES:,} samples. A stop "
    "lasts 5 s where nobody ends the worker before: one that the others wait for is ended after 3 "
    "usual steps, and replaced. Left behind are processes, whoever their parent is, files, and "
    "names in /dev/shm."
)


def draw_plan(seconds: float, num_faults: int, seed: int) -> list[str]:
    """Draw faults at random moments, with at most two workers impaired at once."""
    rng = random.Random(seed)
    kinds = ["kill"] * round(num_faults * KILLS)
    kinds += ["stop"] * (num_faults - len(kinds))
    durations_s = {"kill": BACK_S, "stop": STOP_S}
    rng.shuffle(kinds)
    impaired: list[tuple[float, float, int]] = []
    lines = []
    for kind in sorted(kinds, key=lambda kind: -durations_s[kind]):  # place the longest first
        while True:
            start_s = rng.uniform(2.0, seconds - durations_s[kind] - 2.0)
            stop_s = start_s + durations_s[kind]
            overlapping = [span for span in impaired if span[0] < stop_s and start_s < span[1]]
            if len(overlapping) < MAX_IMPAIRED:
                break
        busy = {span[2] for span in overlapping}
        worker = rng.choice([seat for seat in range(WORKERS) if seat not in busy])
        impaired.append((start_s, stop_s, worker))
        duration = f" for {STOP_S:g}s" if kind == "stop" else ""
        lines.append(f"{kind} worker {worker} at {start_s:.3f}s{duration}")
    return lines


def launch(folder: Path, protocol: str, seconds: float, faults: list[str]) -> subprocess.Popen[str]:
    """Start a run of ``seconds``."""
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable, "-m", "paceline", "launch", "--workers", str(WORKERS), "--protocol",
        protocol, "--device", "cpu", "--threads", "1", "--seconds", str(seconds), "--respawn",
        "--checkpoint-every", "never", "--run-dir", "run",
        *(word for fault in faults for word in ("--fault", fault)), "train.py",
    ]  # fmt: skip
    screen, scratch = (folder / "screen").open("w"), folder / "tmp"
    scratch.mkdir()
    caches = folder / "caches"  # torch's own cache, shared by all runs of a user
    environment = {
        **os.environ, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(caches),
    }  # fmt: skip
    return subprocess.Popen(
        command, cwd=folder, stdout=screen, stderr=screen, text=True, env=environment
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run with faults, from its trace."""

    num_struck: int
    respawn_s: list[float]
    """Seconds from the kill of each worker to the first step of its next life."""
    gaps_s: list[float]
    """Seconds from each kill to the next update."""
    is_exact: bool
    left: tuple[str, ...]
    """Processes, files and names in /dev/shm that are left afterwards."""


def evaluate(records: list[Record], left: tuple[str, ...]) -> Outcome:
    """Evaluate a run."""
    ordered = [record for record in records if isinstance(record, Ordered)]
    times = [record.t_s for record in ordered if isinstance(record.order, Apply)]
    faults = [record for record in records if isinstance(record, Struck)]
    kills = [record for record in faults if record.text.startswith("kill")]
    return Outcome(
        num_struck=len(faults),
        respawn_s=_respawn_times_s(records, kills),
        gaps_s=[
            min((t for t in times if t > kill.t_s), default=math.inf) - kill.t_s for kill in kills
        ],
        is_exact=_is_exact(ordered),
        left=left,
    )


def _is_exact(ordered: list[Ordered]) -> bool:
    """Whether there are whole epochs, each of which used each of its samples exactly once, and no
    other epoch one twice."""
    leases: dict[tuple[int, int], Any] = {}
    used: dict[int, Counter[int]] = {}
    whole_epochs = []
    for record in ordered:
        if isinstance(record.order, Grant):
            leases[record.order.ticket[:2]] = record.order.leases
        elif isinstance(record.order, Apply):
            for ticket in record.order.tickets:
                for lease in leases[ticket[:2]]:
                    used.setdefault(lease.epoch, Counter()).update(range(lease.start, lease.stop))
        elif isinstance(record.order, EpochEnd):
            whole_epochs.append(record.order.epoch)
    is_once = all(set(counts.values()) == {1} for counts in used.values())
    return (
        bool(whole_epochs)
        and is_once
        and all(len(used[epoch]) == NUM_SAMPLES for epoch in whole_epochs)
    )


def _respawn_times_s(records: list[Record], kills: list[Struck]) -> list[float]:
    """Return the seconds from each kill until the next life joins."""
    joined = [
        (record.worker, record.fact.at_s)
        for record in records
        if isinstance(record, Heard) and isinstance(record.fact, Joined)
    ]
    times = []
    for kill in kills:
        worker = int(kill.text.split()[2])
        later = [at_s for seat, at_s in joined if seat == worker and at_s > kill.t_s]
        times.append(min(later, default=math.inf) - kill.t_s)
    return times


def updates_within(records: list[Record], seconds: float) -> int:
    """Count the updates within ``seconds`` of the first grant."""
    ordered = [record for record in records if isinstance(record, Ordered)]
    first_s = next(record.t_s for record in ordered if isinstance(record.order, Grant))
    applied = [record.t_s for record in ordered if isinstance(record.order, Apply)]
    return sum(t_s - first_s <= seconds for t_s in applied)


def measure(protocol: str, seconds: float, faults: list[str]) -> tuple[float, int, Outcome]:
    """Return the updates without and with faults, and the evaluation of the latter run."""
    shm_names, left = set(os.listdir("/dev/shm")), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        traces = []
        for name, plan in (("before", []), ("struck", faults), ("after", [])):
            folder = Path(scratch) / name
            folder.mkdir()
            process = launch(folder, protocol, seconds, plan)
            try:
                if process.wait(seconds + 120.0):
                    sys.exit((folder / "screen").read_text())
            finally:
                process.kill()  # no effect on one that has ended
            traces.append(list(read_trace(folder / "run" / FILE_NAME)))
            if plan:
                left = [*left_behind(folder / "tmp"), *set(os.listdir("/dev/shm")) - shm_names]
        before, struck, after = (updates_within(records, seconds) for records in traces)
        return (before + after) / 2, struck, evaluate(traces[1], tuple(left))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", default=PROTOCOLS, choices=PROTOCOLS)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    seconds, machine_note = 60.0 * arguments.minutes, machine()
    num_faults = round(FAULTS_PER_MINUTE * arguments.minutes)
    plan = draw_plan(seconds, num_faults, arguments.seed)
    rows, is_well = [], True
    for protocol in arguments.only:
        calm, struck, outcome = measure(protocol, seconds, plan)
        goodput, wanted = struck / calm, WANTED.get(protocol, 0.0)
        is_well &= goodput >= wanted and outcome.is_exact and not outcome.left
        row = (
            protocol, f"{calm / seconds:.2f}", f"{struck / seconds:.2f}", f"{goodput:.1%}",
            f">= {wanted:.1%}" if wanted else "reported", f"{outcome.num_struck} of {len(plan)}",
            _spread(outcome.respawn_s), _spread(outcome.gaps_s),
            "yes" if outcome.is_exact else "NO",
            ", ".join(outcome.left) or "nothing",
        )  # fmt: skip
        rows.append(row)
        print(" | ".join(row), flush=True)
    if arguments.write:
        title = f"Goodput: {len(plan)} kills and stops in {arguments.minutes:g} minutes"
        write_table("goodput", title, HEADER, rows, f"{NOTE} {machine_note}.")
    sys.exit(not is_well)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}, {max(values):.2f}" if values else "-"


if __name__ == "__main__":
    main()
