"""Goodput: the updates that are left of a run whose workers are killed and stopped all the time.

    python bench/goodput.py [--minutes 10] [--only PROTOCOL ...] [--write]

Eight workers whose steps wait 200 ms, so that two cores carry them, with ``--respawn``; 62 faults
in ten minutes (fewer in fewer), three quarters of them ``kill -9``, the others stops of 5 s. The
same run without faults goes beside it, at the same time on the same cores. Goodput is raw: its
updates over those, both from the first step on; nothing is credited for new lives.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from chaos import Outcome, draw_plan, outcome
from paceline.events import Apply, Grant
from paceline.trace import FILE_NAME, read_trace
from paceline.trace.records import Ordered, Record
from table import machine, write_table

WORKERS = 8
PROTOCOLS = ("k-sync:6", "k-batch-async:8", "full-sync")
WANTED = {"k-sync:6": 0.977, "k-batch-async:8": 0.977}
FAULTS_PER_MINUTE, KILLS = 6.2, 0.75
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
    "each sample once",
)  # fmt: skip
NOTE = (
    "Both runs at the same time; updates from the first step on, for as long as both went. A stop "
    "lasts 5 s where nobody ends the worker before: one that the others wait for is ended after 3 "
    "usual steps, and replaced."
)


def launch(folder: Path, protocol: str, seconds: float, faults: list[str]) -> subprocess.Popen[str]:
    """Begin a run of so many seconds."""
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable, "-m", "paceline", "launch", "--workers", str(WORKERS), "--protocol",
        protocol, "--device", "cpu", "--threads", "1", "--seconds", str(seconds), "--respawn",
        "--checkpoint-every", "never", "--run-dir", "run",
        *(word for fault in faults for word in ("--fault", fault)), "train.py",
    ]  # fmt: skip
    screen = (folder / "screen").open("w")
    return subprocess.Popen(command, cwd=folder, stdout=screen, stderr=screen, text=True)


def updates_within(records: list[Record], seconds: float) -> int:
    """How many updates were made so long from the first grant on."""
    ordered = [one for one in records if isinstance(one, Ordered)]
    first_s = next(one.t_s for one in ordered if isinstance(one.order, Grant))
    applied = [one.t_s for one in ordered if isinstance(one.order, Apply)]
    return sum(t_s - first_s <= seconds for t_s in applied)


def measure(protocol: str, seconds: float, faults: list[str]) -> tuple[int, int, Outcome]:
    """Updates without faults and with them, and more of the latter run."""
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
        calm, struck = (updates_within(records, seconds) for records in found)
        return calm, struck, outcome(found[1], 0, faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", default=PROTOCOLS, choices=PROTOCOLS)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    seconds, where = 60.0 * arguments.minutes, machine()
    num_faults = round(FAULTS_PER_MINUTE * arguments.minutes)
    plan = draw_plan(seconds, num_faults, arguments.seed, kills=KILLS, stops=1.0 - KILLS)
    rows, is_well = [], True
    for protocol in arguments.only:
        calm, struck, found = measure(protocol, seconds, plan)
        goodput, wanted = struck / calm, WANTED.get(protocol, 0.0)
        is_well &= goodput >= wanted and found.is_exact
        row = (
            protocol, f"{calm / seconds:.2f}", f"{struck / seconds:.2f}", f"{goodput:.1%}",
            f">= {wanted:.1%}" if wanted else "reported", f"{found.num_struck} of {len(plan)}",
            _spread(found.back_s), _spread(found.gaps_s), "yes" if found.is_exact else "NO",
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
