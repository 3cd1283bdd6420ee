"""ResNet-18, the chapter's variant, 40 updates each way: one worker and two.

    python bench/resnet.py [--write] [--updates 40]

One worker with batch 256 and lr 0.1, two workers with batch 512 and lr 0.2, on the CPU. Shows that
both learn, and the time of an update. Writes results/resnet18.md.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from paceline.config import resolve
from paceline.launch.launcher import launch_run
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.report.summary import Summary
from paceline.trace import FILE_NAME, read_trace
from paceline.trace.records import Handed
from table import machine, write_table

CASES = ((1, 256, 0.1), (2, 512, 0.2))
EDGE = 5
"""Pushes at the start and at the end whose losses are averaged."""


def measure(workers: int, batch_size: int, lr: float, updates: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "workers": workers, "batch_size": batch_size, "lr": lr, "updates": updates,
            "device": "cpu", "run_dir": f"{folder}/run",
        }  # fmt: skip
        summary = launch_run(TaskProgram(task="resnet18"), resolve(flags).settings, QuietObserver())
        records = list(read_trace(Path(folder) / "run" / FILE_NAME))
    assert isinstance(summary, Summary)
    losses = [record.fact.loss for record in records if isinstance(record, Handed)]
    num_edge = EDGE * workers
    first, last = statistics.mean(losses[:num_edge]), statistics.mean(losses[-num_edge:])
    return [
        str(workers), str(batch_size), f"{lr:g}", str(summary.updates),
        f"{summary.time_per_update_s:.2f}", f"{summary.samples_per_s:.1f}",
        f"{first:.3f}", f"{last:.3f}", "yes" if last < first else "no",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--updates", type=int, default=40)
    options = parser.parse_args()
    rows = []
    for case in CASES:
        rows.append(measure(*case, options.updates))
        print(" | ".join(rows[-1]), flush=True)
    header = [
        "workers", "batch", "lr", "updates", "seconds an update", "images/s",
        f"loss, first {EDGE} updates", f"loss, last {EDGE}", "learns",
    ]  # fmt: skip
    if options.write:
        write_table("resnet18", "ResNet-18, 40 updates each way", header, rows, machine())


if __name__ == "__main__":
    main()
