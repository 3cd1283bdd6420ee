"""What an outer optimizer is worth where exchanges are dear: equal samples, equal exchanges.

    python bench/outer.py [--task mlp] [--steps 16] [--epochs 2] [--repeats 2] [--write]

Training in virtual time, with the losses of real gradients. All go through the same samples. An
exchange comes after every step (full-sync, what all others are measured by), or after H of them:
full-sync with batches H times as large, local-sgd:H, DiLoCo and its kin, at once or in fragments
of which one is exchanged every H/F steps and merged O steps later, post-local-sgd. Each is
shown at the rate, of a few, where the median test loss of its seeds is least; large batches have
larger rates to choose from. MB are the bytes that an update moves, of a fragment their mean, times
the updates; the last of an epoch moves all.

Writes results/outer.md.
"""

import argparse
import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import torch

from averaging import Quiet
from paceline.config import RunSettings
from paceline.predict.comparison import Contest, compare
from paceline.predict.simulation import World
from paceline.protocols import parse
from paceline.report.compared import RunOutcome
from paceline.system.processors import num_cores
from paceline.workloads import load_task
from table import machine, write_table

WORKERS, MINI_BATCH_SIZE = 4, 16
RATES, LARGE_RATES = (0.05, 0.1, 0.2), (0.2, 0.4, 0.8)
OUTERS = ("none", "momentum:0.7,0.5", "nesterov:0.7,0.5", "nesterov:0.7,0.9")
STREAMED = ("+nesterov:0.7,0.5+fragments:4", "+nesterov:0.7,0.5+fragments:4,2")
FIRST_UPDATES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is compared."""

    task: str
    steps: int
    epochs: int
    repeats: int


class Found(NamedTuple):
    """A protocol at its best rate."""

    protocol: str
    batch: int
    rate: float
    outcomes: Sequence[RunOutcome]

    @property
    def losses(self) -> list[float]:
        return [one.test_loss for one in self.outcomes if one.test_loss is not None]

    @property
    def loss(self) -> float:
        return statistics.median(self.losses)

    def __str__(self) -> str:
        return f"{self.protocol}, mini-batches of {self.batch}, rate {self.rate:g}: {self.loss:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="mlp")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    note = machine()
    asked = Question(
        task=options.task, steps=options.steps, epochs=options.epochs, repeats=options.repeats
    )
    task = load_task(asked.task, WORKERS)
    update_bytes = sum(one.numel() * one.element_size() for one in task.model().parameters())
    found = race(asked)
    rows = [row(one, WORKERS * update_bytes, asked.epochs) for one in found]
    for cells in rows:
        print(" | ".join(cells), flush=True)
    if options.write:
        header = ["protocol", "mini-batch", "rate", "exchanges", "MB", "test loss", "from, to",
                  "test error"]  # fmt: skip
        text = (
            f"{asked.task}, {WORKERS} workers, {asked.epochs} epochs of "
            f"{len(task.data().train):,} samples, in virtual time. "  # type: ignore[arg-type]  # a map-style data set has a length
            f"Losses are medians of {asked.repeats} seeds, with the least and the greatest; rates "
            f"are each one's best of {said(RATES)}, with large batches of {said(LARGE_RATES)}. MB: "
            f"what all workers push. {note}"
        )
        write_table("outer", "What an outer optimizer is worth", header, rows, text)


def contenders(steps: int) -> list[tuple[str, int, tuple[float, ...]]]:
    """Protocol, samples a worker takes at once, and rates to try."""
    outers = ["" if one == "none" else f"+{one}" for one in OUTERS]
    return [
        ("full-sync", MINI_BATCH_SIZE, RATES),
        ("full-sync", steps * MINI_BATCH_SIZE, LARGE_RATES),
        *((f"local-sgd:{steps}{outer}", MINI_BATCH_SIZE, RATES) for outer in outers),
        *((f"local-sgd:{steps}{one}", MINI_BATCH_SIZE, RATES) for one in STREAMED),
        (f"post-local-sgd:{FIRST_UPDATES},{steps}", MINI_BATCH_SIZE, RATES),
    ]


def race(asked: Question) -> list[Found]:
    """Each at its best rate. Time is virtual, so a run may have a core of its own."""
    entries = contenders(asked.steps)
    runs = [(name, batch, rate) for name, batch, rates in entries for rate in rates]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_cores(), mp_context=spawn) as pool:
        tried = []
        for one in pool.map(run, repeat(asked), *zip(*runs, strict=True)):
            tried.append(one)
            print(f"{len(tried)} of {len(runs)}: {one}", flush=True)
    return [best([one for one in tried if one[:2] == entry[:2]]) for entry in entries]


def best(tried: Sequence[Found]) -> Found:
    """The one with the least loss, of one protocol at several rates."""
    ended = [one for one in tried if math.isfinite(sum(one.losses)) and one.losses]
    if not ended:
        raise SystemExit(f"{tried[0].protocol} diverged at every rate")
    return min(ended, key=lambda one: one.loss)


def run(asked: Question, protocol: str, batch: int, rate: float) -> Found:
    """All seeds of one protocol at one rate."""
    torch.set_num_threads(1)
    contest = Contest(
        task=asked.task, protocols=(protocol,), repeats=asked.repeats, is_simulated=True,
        world=World(delay=("10ms",)),
        settings=RunSettings(
            workers=WORKERS, mini_batch_size=batch, epochs=asked.epochs, lr=rate, nonfinite="skip"
        ),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        found = compare(contest, Quiet(), Path(folder) / "runs")
    return Found(protocol, batch, rate, found.contenders[0].outcomes)


def said(rates: Sequence[float]) -> str:
    return ", ".join(f"{one:g}" for one in rates)


def row(one: Found, update_bytes: int, epochs: int) -> list[str]:
    """What it came to."""
    errors = [run.test_error for run in one.outcomes if run.test_error is not None]
    updates = one.outcomes[0].updates
    count = parse(one.protocol, WORKERS).streaming.num_fragments
    moved = (updates + (count - 1) * epochs) / count * update_bytes
    return [
        f"`{one.protocol}`", f"{one.batch}", f"{one.rate:g}", f"{updates:,}",
        f"{moved / 1e6:,.0f}", f"{one.loss:.4f}",
        f"{min(one.losses):.4f}, {max(one.losses):.4f}", f"{statistics.median(errors):.4f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
