"""What a stream costs: LeNet from an iterable data set against the same samples by their numbers.

    python bench/streams.py [--rounds 8] [--epochs 2] [--write]

Two workers under full-sync, 256 samples an update. A round runs three kinds in a random order, each
a launch of its own: the map-style loader as it is (between peers), the same through the store,
as a stream goes, and the stream. What a run says itself is compared: images a second over its
epochs, after the first. Writes results/streams.md.
"""

import argparse
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from paceline.config import RunSettings
from paceline.launch.launcher import launch_run
from paceline.program import ScriptProgram
from paceline.report.live import QuietObserver
from paceline.workloads import load_task
from table import interval, machine, spread, write_table

BATCH, WANTED = 256, 0.97
KINDS = {
    "by numbers, between peers": ("numbers", "peers"),
    "by numbers, through the store": ("numbers", "store"),
    "stream": ("stream", "auto"),
}


class Images(IterableDataset[Any]):
    """The images one after the other."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return (self._data[number] for number in range(len(self._data)))


def train(kind: str, epochs: int) -> None:
    """In a worker: the loop of a script."""
    import paceline

    pace = paceline.connect()
    task = load_task("lenet", pace.num_workers, "default")
    data: Any = task.data()
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = Images(data.train) if kind == "stream" else data.train
    # A loader worker for the map-style kinds, too: the stream is read in one.
    loader: Any = DataLoader(samples, batch_size=BATCH, num_workers=1)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    loss_of = nn.functional.cross_entropy
    for _ in pace.epochs(epochs):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()


def images_per_s(kind: str, path: str, epochs: int) -> float:
    """Of one run, without its first epoch."""
    with tempfile.TemporaryDirectory() as folder:
        settings = RunSettings(
            workers=2, protocol="full-sync", path=path, device="cpu", seed=0,
            run_dir=str(Path(folder) / "run"), checkpoint_every="never",
        )  # fmt: skip
        program = ScriptProgram(path=__file__, args=("--kind", kind, "--epochs", str(epochs)))
        summary = launch_run(program, settings, QuietObserver())
        assert summary is not None
        later = summary.epochs[1:]
        updates = sum(one.updates for one in later)
        return updates * BATCH / sum(one.seconds for one in later)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--kind", help="for a worker")
    options = parser.parse_args()
    if options.kind:
        train(options.kind, options.epochs)
        return
    note, rng = machine(), random.Random(0)
    speeds: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(options.rounds):
        order = list(KINDS)
        rng.shuffle(order)
        for name in order:
            speeds[name].append(images_per_s(*KINDS[name], options.epochs))
            print(f"{name}: {speeds[name][-1]:,.0f} images/s", flush=True)
    rows = []
    for name in KINDS:
        ratios = [a / b for a, b in zip(speeds["stream"], speeds[name], strict=True)]
        middle, low, high = interval(ratios)
        is_other = name != "stream"
        rows.append([
            name, spread(speeds[name], 0), f"{middle:.3f}" if is_other else "",
            f"{low:.3f} to {high:.3f}" if is_other else "", f">= {WANTED}" if is_other else "",
            ("yes" if middle >= WANTED else "no") if is_other else "",
        ])  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    header = ["input", "images/s", "stream : input", "95 % interval", "wanted", "reached"]
    if options.write:
        write_table("streams", "A stream against samples by their numbers, LeNet", header, rows,
                    f"{options.rounds} rounds of three runs in a random order, 2 workers, "
                    f"{len(os.sched_getaffinity(0))} cores; median (least to most). {note}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
