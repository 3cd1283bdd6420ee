"""The cost of the input: LeNet from Fashion-MNIST's files against one cached batch.

    python bench/loader.py [--rounds 60] [--write]

Three loops in one process, all cores, batch 256: the four lines over the data set as ``paceline
train lenet`` opens it (files read and checked, bytes kept, batches gathered and converted); the
same step on one cached batch, the ceiling; and the data set through torch's own collate, sample by
sample, as in most scripts. Blocks of two steps in turn. Writes results/loader.md.
"""

import argparse
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from overhead import STEPS, bare_s, block_s, ratios
from paceline.context import Context
from paceline.data.arrays import collate_batch
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.workloads import load_task
from table import interval, machine, spread, write_table

BATCH, WANTED = 256, 0.97
Step = Callable[[], None]
loss_of = nn.functional.cross_entropy


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = load_task("lenet", 1, "default").model()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def file_step(collate: Any) -> Step:
    """Return a step of the four lines over the files."""
    data: Any = load_task("lenet", 1, "default").data()
    assert "Fashion-MNIST" in data.source, f"wanted Fashion-MNIST, found {data.source}"
    loader = DataLoader(data.train, batch_size=BATCH, shuffle=True, collate_fn=collate)
    pace = Pace(SoloExchange(), Context())
    model, optimizer, loader = pace.prepare(*make_parts(), loader)

    def loop() -> Iterator[None]:
        for _ in pace.epochs(1_000_000):
            for inputs, targets in loader:
                with pace.step():
                    optimizer.zero_grad()
                    loss_of(model(inputs), targets).backward()
                    optimizer.step()
                yield

    return loop().__next__


def cached_step() -> Step:
    """Return a step of the ceiling: no loader, no Paceline."""
    data: Any = load_task("lenet", 1, "default").data()
    inputs, targets = collate_batch(data.train.__getitems__(list(range(BATCH))))
    model, optimizer = make_parts()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    note = machine()
    loops = {
        "bare": cached_step(),
        "files, gathered by the batch": file_step(collate_batch),
        "files, sample by sample": file_step(None),
        "bare again": cached_step(),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    rng = random.Random(0)
    for number in range(options.rounds + 1):
        order = list(loops)
        rng.shuffle(order)
        for name in order:
            seconds = block_s(loops[name])
            if number:
                times[name].append(seconds)
    rows = []
    for name in list(loops)[1:]:
        median, low, high = interval([1 / ratio for ratio in ratios(times, name)])
        is_judged = name.endswith("batch")
        rows.append([
            "cached again" if name == "bare again" else name,
            spread([1000 * s / STEPS for s in times[name]]),
            spread([1000 * s / STEPS for s in bare_s(times, name)]), f"{median:.4f}",
            f"{low:.4f} to {high:.4f}", f">= {WANTED}" if is_judged else "",
            ("yes" if median >= WANTED else "no") if is_judged else "",
        ])  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    header = [
        "input", "ms a step", "cached batch, ms a step", "cached : input", "95 % interval",
        "wanted", "reached",
    ]  # fmt: skip
    if options.write:
        write_table("loader", "Input against one cached batch, LeNet 256", header, rows,
                    f"{options.rounds} interleaved blocks of {STEPS} steps; median (least to "
                    f"most); the four lines are part of the input's time. {note}")  # fmt: skip


if __name__ == "__main__":
    main()
