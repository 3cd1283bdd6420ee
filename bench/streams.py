"""What a stream costs: LeNet from an iterable data set against the same samples by their numbers.

    python bench/streams.py [--rounds 12] [--write]

Two workers under full-sync, 256 samples an update. A stream goes between peers as other data does,
but for the end of each pass; its samples come one by one, where a data set of tensors gathers a
batch at once, so each of the two is held against what it can be had with. A round runs all kinds in
a random order, each a launch of its own:

    one by one    the samples by their numbers, each for itself: between peers, through the store;
                  and as a stream
    gathered      the samples by their numbers, a mini-batch at once: between peers; and as a stream
                  whose data set gives whole mini-batches

Images a second are compared: over as many updates as an epoch has, from an update in the first one
on, so that one border of epochs is among them. Writes results/streams.md.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.config import RunSettings
from paceline.data.arrays import collate_batch
from paceline.launch.launcher import launch_run
from paceline.program import ScriptProgram
from paceline.report.live import QuietObserver
from paceline.workloads import load_task
from table import interval, machine, spread, write_table

BATCH, WORKERS, WANTED = 256, 2, 0.97
WARM, COUNTED = 30, 235
"""Updates before the clock runs, and while it does: an epoch has 235."""
KINDS = {
    "one by one, between peers": ("samples", "peers"),
    "one by one, through the store": ("samples", "store"),
    "stream of samples": ("stream", "auto"),
    "gathered, between peers": ("batches", "peers"),
    "stream of mini-batches": ("stream of batches", "auto"),
}
"""Name -> what `train` is told, and the path; each stream is held against those before it."""


class OneByOne(Dataset[Any]):
    """A data set that cannot gather."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        return self._data[number]


class Stream(IterableDataset[Any]):
    """The images one after the other, or so many at once."""

    def __init__(self, data: Any, at_once: int = 0) -> None:
        self._data, self._at_once = data, at_once

    def __iter__(self) -> Iterator[Any]:
        size = self._at_once
        if not size:
            return (self._data[number] for number in range(len(self._data)))
        starts = range(0, len(self._data), size)
        return (
            collate_batch(self._data.__getitems__(range(one, min(one + size, len(self._data)))))
            for one in starts
        )


def loader_of(kind: str, data: Any) -> Any:
    """With a loader worker for all kinds: a stream is read in one."""
    if kind == "stream of batches":
        return DataLoader(Stream(data, BATCH // WORKERS), batch_size=None, num_workers=1)
    if kind == "batches":
        return DataLoader(data, batch_size=BATCH, num_workers=1, collate_fn=collate_batch)
    samples = Stream(data) if kind == "stream" else OneByOne(data)
    return DataLoader(samples, batch_size=BATCH, num_workers=1)


def train(kind: str, seconds: Path) -> None:
    """In a worker: the loop of a script; the main one writes how long the counted updates took."""
    import paceline

    pace = paceline.connect()
    task = load_task("lenet", pace.num_workers, "default")
    data: Any = task.data()
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = loader_of(kind, data.train)
    batch = "per-worker" if kind == "stream of batches" else "global"
    model, optimizer, loader = pace.prepare(model, optimizer, loader, batch=batch)
    loss_of = nn.functional.cross_entropy
    num_updates, begun_s = 0, 0.0
    for _ in pace.epochs(2):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            num_updates += 1
            if num_updates == WARM:
                begun_s = time.perf_counter()
            elif num_updates == WARM + COUNTED and pace.is_main:
                seconds.write_text(str(time.perf_counter() - begun_s))


def images_per_s(kind: str, path: str) -> float:
    """Of one run."""
    with tempfile.TemporaryDirectory() as folder:
        settings = RunSettings(
            workers=WORKERS, protocol="full-sync", path=path, device="cpu", seed=0,
            run_dir=str(Path(folder) / "run"), checkpoint_every="never",
            updates=WARM + COUNTED + 1,
        )  # fmt: skip
        seconds = Path(folder) / "seconds"
        program = ScriptProgram(path=__file__, args=("--kind", kind, "--seconds", str(seconds)))
        launch_run(program, settings, QuietObserver())
        return COUNTED * BATCH / float(seconds.read_text())


def rows_of(speeds: dict[str, list[float]]) -> list[list[str]]:
    """Each kind, and what a stream comes to beside it."""
    names = list(KINDS)
    rows = []
    for place, name in enumerate(names):
        cells = [name, spread(speeds[name], 0)]
        if "stream of" in name:
            rows.append([*cells, "", "", "", ""])
            continue
        stream = next(one for one in names[place:] if "stream of" in one)
        ratios = [a / b for a, b in zip(speeds[stream], speeds[name], strict=True)]
        middle, low, high = interval(ratios)
        is_reached = "yes" if middle >= WANTED else "no"
        rows.append([
            *cells, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f">= {WANTED}", is_reached
        ])  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--kind", help="for a worker")
    parser.add_argument("--seconds", type=Path, help="for a worker")
    options = parser.parse_args()
    if options.kind:
        train(options.kind, options.seconds)
        return
    note, rng = machine(), random.Random(0)
    speeds: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(options.rounds):
        order = list(KINDS)
        rng.shuffle(order)
        for name in order:
            speeds[name].append(images_per_s(*KINDS[name]))
            print(f"{name}: {speeds[name][-1]:,.0f} images/s", flush=True)
    rows = rows_of(speeds)
    for row in rows:
        print(" | ".join(row), flush=True)
    header = ["input", "images/s", "its stream : input", "95 % interval", "wanted", "reached"]
    if options.write:
        write_table("streams", "A stream against samples by their numbers, LeNet", header, rows,
                    f"{options.rounds} rounds of five runs in a random order, {WORKERS} workers, "
                    f"{len(os.sched_getaffinity(0))} cores; median (least to most). {note}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
