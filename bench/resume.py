"""Runs that are cut off at random points and resumed: are they equal in every bit?

    python bench/resume.py [--points 20] [--write]

LeNet on 1,280 images of Fashion-MNIST, two workers, full-sync, batches of 64, two epochs (40
updates); half of the points between peers, half through the store. Each point is a separate run
that stops after that many updates and is resumed by new processes. Equal means every loss of every
push and every bit of the model, against a run that was not cut off. Writes results/resume.md.
"""

import argparse
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from paceline.checkpoints.resumption import adopt
from paceline.config import resolve
from paceline.data.arrays import ArrayDataset, Splits
from paceline.launch import launcher
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.trace.records import Handed
from paceline.workloads import load_task
from paceline.workloads.base import Task
from quiet_runs import records_of
from table import machine, write_table

NUM_IMAGES, BATCH, EPOCHS = 1_280, 64, 2
UPDATES = EPOCHS * NUM_IMAGES // BATCH


def make_small_lenet() -> Task:
    lenet = load_task("lenet", 2)

    def data() -> Splits:
        train: Any = lenet.data().train
        images = ArrayDataset(train.inputs[:NUM_IMAGES], train.targets[:NUM_IMAGES])
        return Splits(train=images, source="Fashion-MNIST, its first images")

    return replace(lenet, data=data, batch_size=BATCH, epochs=EPOCHS)


def train_task(task: Task, **flags: Any) -> None:
    """Train a run, or with ``resume`` the rest of one."""
    run_flags = {"workers": 2, "device": "cpu", "threads": 1, **flags}
    resolved = resolve(run_flags, env={}, is_call=True)
    launcher.launch_run(TaskProgram(task=task), adopt(resolved), QuietObserver())


def outcome(folder: Path) -> tuple[dict[tuple[int, ...], float], dict[str, torch.Tensor]]:
    """Return the loss of each push, by its version and samples, and the model."""
    facts = [record.fact for record in records_of(folder) if isinstance(record, Handed)]
    by_version: dict[int, list[float]] = {}
    for fact in facts:
        by_version.setdefault(fact.ticket.version, []).append(fact.loss)
    losses: dict[tuple[int, ...], float] = {
        (version, i): loss
        for version, row in by_version.items()
        for i, loss in enumerate(sorted(row))
    }
    return losses, load_file(folder / "model.safetensors")


def is_equal(first: Path, second: Path) -> bool:
    (losses, model), (other_losses, other_model) = outcome(first), outcome(second)
    is_same_model = all(torch.equal(value, other_model[name]) for name, value in model.items())
    return losses == other_losses and model.keys() == other_model.keys() and is_same_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, task, rng, rows = machine(), make_small_lenet(), random.Random(5), []
    for path in ("peers", "store"):
        with tempfile.TemporaryDirectory() as folder:
            uncut = Path(folder) / "whole"
            train_task(task, run_dir=str(uncut), path=path)
            cuts = sorted(rng.sample(range(1, UPDATES), options.points // 2))
            equal = []
            for cut in cuts:
                run_dir = Path(folder) / str(cut)
                train_task(task, run_dir=str(run_dir), path=path, updates=cut)
                train_task(task, resume=str(run_dir), updates=10 * UPDATES)
                equal.append(is_equal(run_dir, uncut))
        rows.append([path, ", ".join(map(str, cuts)), f"{sum(equal)} of {len(cuts)}"])
        print(" | ".join(rows[-1]), flush=True)
    if options.write:
        header = ["gradients go by", "cut off after updates", "equal in every bit"]
        write_table("resume", f"Cut off and resumed, of {UPDATES} updates", header, rows, note)


if __name__ == "__main__":
    main()
