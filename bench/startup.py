"""Start-up time: the help, the import, and the first step of four workers.

    python bench/startup.py [--quick] [--write]

`paceline --help` (median of 15), `import paceline` (which must not import torch), and the time
from `paceline launch --workers 4 SCRIPT` until the last of the four workers has its first batch,
less one `python -c "import torch"` of the same round. Writes results/startup.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import machine, spread, write_table

WORKERS = 4
WANTED_HELP_S, WANTED_START_S = 0.2, 1.0


def run_worker(folder: Path) -> None:
    """Run the README's loop and record the time of the first batch, by the machine's clock."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import paceline

    pace = paceline.connect()
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.rand(64, 8), torch.zeros(64).long()), batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    is_first = True
    for _ in pace.epochs(1):
        for inputs, targets in loader:
            if is_first:
                (folder / str(pace.worker)).write_text(repr(time.perf_counter()))
                is_first = False
            with pace.step():
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()


def command_s(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def first_step_s() -> float:
    """Return the seconds from the launch to the last worker's first batch."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "paceline", "launch", "--workers", str(WORKERS), "--run-dir",
             f"{folder}/run", __file__, "--worker", folder],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        times_s = [float((Path(folder) / str(seat)).read_text()) for seat in range(WORKERS)]
    return max(times_s) - start


def imports_torch() -> bool:
    code = "import sys, paceline; sys.exit('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code]).returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    num_short, num_long = (3, 1) if options.quick else (15, 7)
    help_s, empty_s = [], []
    for _ in range(num_short):
        empty_s.append(command_s("-c", "pass"))
        help_s.append(command_s("-m", "paceline", "--help"))
    first_step_s()  # unmeasured: the files are read from the disk
    import_s, start_s = [], []
    for _ in range(num_long):
        import_s.append(command_s("-c", "import torch"))
        start_s.append(first_step_s())
    own_s = [a - b for a, b in zip(start_s, import_s, strict=True)]
    rows = [
        ["paceline --help, s", spread(help_s, 3), f"< {WANTED_HELP_S}",
         _verdict(help_s, WANTED_HELP_S)],
        ["python that does nothing, s", spread(empty_s, 3), "", ""],
        ["import paceline imports torch", "yes" if imports_torch() else "no", "no",
         "no" if imports_torch() else "yes"],
        [f"launch to the last of {WORKERS} first steps, s", spread(start_s), "", ""],
        ["python -c 'import torch', s", spread(import_s), "", ""],
        ["the first less the second, s", spread(own_s), f"< {WANTED_START_S:g}",
         _verdict(own_s, WANTED_START_S)],
    ]  # fmt: skip
    for row in rows:
        print(" | ".join(row), flush=True)
    note = f"{num_short} and {num_long} rounds in turn; median (least to most). {note}"
    if options.write:
        write_table("startup", "Beginnings", ["what", "measured", "wanted", "reached"], rows, note)


def _verdict(values: list[float], wanted_s: float) -> str:
    return "yes" if statistics.median(values) < wanted_s else "no"


if __name__ == "__main__":
    if "--worker" in sys.argv and "WORLD_SIZE" in os.environ:
        run_worker(Path(sys.argv[-1]))
    else:
        main()
