"""Asynchronous runs replayed from their traces: are they equal in every bit?

    python bench/replay.py [--write] [--updates 1000]

Each run is live, with real processes whose pushes arrive in any order; it is then replayed in one
process from its folder alone. Equal means every decision, every loss and every bit of the final
model. Writes results/replay.md.
"""

import argparse
import tempfile
import time
from pathlib import Path

from paceline.config import resolve
from paceline.launch.launcher import launch_run
from paceline.program import TaskProgram
from paceline.replay import replay
from paceline.report.live import QuietObserver
from paceline.report.summary import Summary
from table import machine, write_table

RUNS = (
    ("softmax", "async", 4, 64),
    ("mlp", "async", 3, 64),
    ("lenet", "async", 2, 32),
    ("mlp", "k-batch-async:3", 3, 48),
    ("softmax", "stale-synchronous:2", 3, 64),
)
"""Task, protocol, workers, samples an update."""


def measure(task: str, protocol: str, workers: int, batch_size: int, updates: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "workers": workers, "protocol": protocol, "batch_size": batch_size,
            "updates": updates, "run_dir": folder, "slow": ("0=2x",),
        }  # fmt: skip
        settings = resolve(flags, env={}, is_call=True).settings
        summary = launch_run(TaskProgram(task=task), settings, QuietObserver())
        assert isinstance(summary, Summary)
        start_s = time.perf_counter()
        result = replay(Path(folder))
        replay_s = time.perf_counter() - start_s
    return [
        task, protocol, str(workers), str(result.version), str(result.pushes),
        f"{summary.staleness_versions.mean:.2f}", f"{replay_s:.1f}",
        "yes" if result.is_equal and result.is_model_equal else f"no: {result.difference}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--updates", type=int, default=1000)
    options = parser.parse_args()
    rows = []
    for case in RUNS:
        rows.append(measure(*case, options.updates))
        print(" | ".join(rows[-1]), flush=True)
    header = [
        "task", "protocol", "workers", "updates", "pushes", "staleness, mean", "replay, s",
        "equal in every bit",
    ]  # fmt: skip
    if options.write:
        note = f"Worker 0 twice as slow. {machine()}"
        write_table("replay", "Runs made again from their traces", header, rows, note)


if __name__ == "__main__":
    main()
