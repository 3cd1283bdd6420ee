"""Test accuracy of LeNet on Fashion-MNIST: three seeds, one and two workers, both initialisations.

    python bench/accuracy.py [--write] [--epochs 10]

Batch 256, lr 0.2, 10 epochs, as in the chapter. Accuracy is exact over the 10,000 test images.
Wanted: mean >= 0.80 with the chapter's initialisation, >= 0.82 with torch's; means of one and two
workers within 0.02. Writes results/accuracy.md.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from paceline.config import resolve
from paceline.launch.launcher import launch_run
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.report.summary import Summary
from table import machine, write_table

SEEDS = (0, 1, 2)
WANTED = {"chapter": 0.80, "default": 0.82}


def accuracy(init: str, workers: int, seed: int, epochs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "workers": workers, "seed": seed, "epochs": epochs, "init": init,
            "run_dir": f"{folder}/run",
        }  # fmt: skip
        summary = launch_run(TaskProgram(task="lenet"), resolve(settings).settings, QuietObserver())
    assert isinstance(summary, Summary)
    assert summary.test_accuracy is not None
    return summary.test_accuracy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    rows = []
    for init, wanted in WANTED.items():
        means = []
        for workers in (1, 2):
            values = [accuracy(init, workers, seed, options.epochs) for seed in SEEDS]
            means.append(statistics.mean(values))
            cells = [f"{value:.4f}" for value in values]
            rows.append([init, str(workers), *cells, f"{means[-1]:.4f}", f">= {wanted}"])
            print(" | ".join(rows[-1]), flush=True)
        print(
            f"{init}: means differ by {abs(means[0] - means[1]):.4f} (wanted <= 0.02)", flush=True
        )
    header = ["initialisation", "workers", *(f"seed {seed}" for seed in SEEDS), "mean", "wanted"]
    if options.write:
        write_table("accuracy", "Accuracy of LeNet on Fashion-MNIST", header, rows, machine())


if __name__ == "__main__":
    main()
