"""Runs that are cut off at random points and go on: are they equal in every bit?

    python bench/resume.py [--points 20] [--write]

LeNet on 1,280 images of Fashion-MNIST, two workers, full-sync, batches of 64, two epochs (40
updates); half of the points between peers, half through the store. Each point is a run of its own
that stops after so many updates and is resumed by new processes. Equal means every loss of every
push and every bit of the model, against a run that nobody cut off. Writes results/resume.md.
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


def small_lenet() -> Task:
    lenet = load_task("lenet", 2)

    def data() -> Splits:
        train: Any = lenet.data().train
        images = ArrayDataset(train.inputs[:NUM_IMAGES], train.targets[:NUM_IMAGES])
        return Splits(train=images, source="Fashion-MNIST, its first images")

    return replace(lenet, data=data, batch_size=BATCH, epochs=EPOCHS)


def go(task: Task, **flags: Any) -> None:
    """A run, or with ``resume`` the rest of one."""
    given = {"workers": 2, "device": "cpu", "threads": 1, **flags}
    resolved = resolve(given, env={}, is_call=True)
    launcher.launch_run(TaskProgram(task=task), adopt(resolved), QuietObserver())


def outcome(folder: Path) -> tuple[dict[tuple[int, ...], float], dict[str, torch.Tensor]]:
    """The loss of each push, by its version and samples, and the model."""
    facts = [one.fact for one in records_of(folder) if isinstance(one, Handed)]
    by_version: dict[int, list[float]] = {}
    for fact in facts:
        by_version.setdefault(fact.ticket.version, []).append(fact.loss)
    losses: dict[tuple[int, ...], float] = {
        (version, i): loss
        for version, row in by_version.items()
        for i, loss in enumerate(sorted(row))
    }
    return losses, load_file(folder / "model.safetensors")


def is_equal(one: Path, other: Path) -> bool:
    (losses, model), (others, its) = outcome(one), outcome(other)
    same = all(torch.equal(value, its[name]) for name, value in model.items())
    return losses == others and model.keys() == its.keys() and same


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, task, rng, rows = machine(), small_lenet(), random.Random(5), []
    for path in ("peers", "store"):
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / "whole"
            go(task, run_dir=str(whole), path=path)
            cuts = sorted(rng.sample(range(1, UPDATES), options.points // 2))
            equal = []
            for cut in cuts:
                place = Path(folder) / str(cut)
                go(task, run_dir=str(place), path=path, updates=cut)
                go(task, resume=str(place), updates=10 * UPDATES)
                equal.append(is_equal(place, whole))
        rows.append([path, ", ".join(map(str, cuts)), f"{sum(equal)} of {len(cuts)}"])
        print(" | ".join(rows[-1]), flush=True)
    if options.write:
        header = ["gradients go by", "cut off after updates", "equal in every bit"]
        write_table("resume", f"Cut off and resumed, of {UPDATES} updates", header, rows, note)


if __name__ == "__main__":
    main()
