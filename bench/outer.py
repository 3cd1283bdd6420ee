"""The gain of an outer optimizer where exchanges are costly: equal samples, equal exchanges.

    python bench/outer.py [--task mlp] [--steps 16] [--epochs 2] [--repeats 2] [--write]

Training in virtual time, with the losses of real gradients. All use the same samples. An exchange
comes after every step (full-sync, the baseline), or after H of them: full-sync with batches H times
as large, local-sgd:H, DiLoCo and its variants, at once or in fragments of which one is exchanged
every H/F steps and merged O steps later, post-local-sgd. Each is shown at the rate, of a few, with
the least median test loss over its seeds; large batches have larger rates to choose from. MB are
the bytes that an update moves, for fragments their mean, times the updates; the last of an epoch
moves all.

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
    """The settings of the comparison."""

    task: str
    steps: int
    epochs: int
    repeats: int


class RateResult(NamedTuple):
    """The outcomes of a protocol at one rate."""

    protocol: str
    batch: int
    rate: float
    outcomes: Sequence[RunOutcome]

    @property
    def losses(self) -> list[float]:
        return [outcome.test_loss for outcome in self.outcomes if outcome.test_loss is not None]

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
    question = Question(
        task=options.task, steps=options.steps, epochs=options.epochs, repeats=options.repeats
    )
    task = load_task(question.task, WORKERS)
    update_bytes = sum(p.numel() * p.element_size() for p in task.model().parameters())
    results = race(question)
    rows = [row(result, WORKERS * update_bytes, question.epochs) for result in results]
    for cells in rows:
        print(" | ".join(cells), flush=True)
    if options.write:
        header = ["protocol", "mini-batch", "rate", "exchanges", "MB", "test loss", "from, to",
                  "test error"]  # fmt: skip
        text = (
            f"{question.task}, {WORKERS} workers, {question.epochs} epochs of "
            f"{len(task.data().train):,} samples, in virtual time. "  # type: ignore[arg-type]  # a map-style data set has a length
            f"Losses are medians of {question.repeats} seeds, with the least and the greatest; "
            f"rates are each one's best of {format_rates(RATES)}, with large batches of "
            f"{format_rates(LARGE_RATES)}. MB: what all workers push. {note}"
        )
        write_table("outer", "What an outer optimizer is worth", header, rows, text)


def contenders(steps: int) -> list[tuple[str, int, tuple[float, ...]]]:
    """Return protocols, the mini-batch of each, and the rates to try."""
    suffixes = ["" if outer == "none" else f"+{outer}" for outer in OUTERS]
    return [
        ("full-sync", MINI_BATCH_SIZE, RATES),
        ("full-sync", steps * MINI_BATCH_SIZE, LARGE_RATES),
        *((f"local-sgd:{steps}{outer}", MINI_BATCH_SIZE, RATES) for outer in suffixes),
        *((f"local-sgd:{steps}{outer}", MINI_BATCH_SIZE, RATES) for outer in STREAMED),
        (f"post-local-sgd:{FIRST_UPDATES},{steps}", MINI_BATCH_SIZE, RATES),
    ]


def race(question: Question) -> list[RateResult]:
    """Return each contender at its best rate, from parallel runs, as time is virtual."""
    entries = contenders(question.steps)
    runs = [(name, batch, rate) for name, batch, rates in entries for rate in rates]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_cores(), mp_context=spawn) as pool:
        results = []
        for result in pool.map(run, repeat(question), *zip(*runs, strict=True)):
            results.append(result)
            print(f"{len(results)} of {len(runs)}: {result}", flush=True)
    return [best([result for result in results if result[:2] == entry[:2]]) for entry in entries]


def best(results: Sequence[RateResult]) -> RateResult:
    """Return the result with the least loss, of one protocol at several rates."""
    converged = [
        result for result in results if math.isfinite(sum(result.losses)) and result.losses
    ]
    if not converged:
        raise SystemExit(f"{results[0].protocol} diverged at every rate")
    return min(converged, key=lambda result: result.loss)


def run(question: Question, protocol: str, batch: int, rate: float) -> RateResult:
    """Run all seeds of one protocol at one rate."""
    torch.set_num_threads(1)
    contest = Contest(
        task=question.task, protocols=(protocol,), repeats=question.repeats, is_simulated=True,
        world=World(delay=("10ms",)),
        settings=RunSettings(
            workers=WORKERS, mini_batch_size=batch, epochs=question.epochs, lr=rate,
            nonfinite="skip",
        ),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare(contest, Quiet(), Path(folder) / "runs")
    return RateResult(protocol, batch, rate, comparison.contenders[0].outcomes)


def format_rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def row(result: RateResult, update_bytes: int, epochs: int) -> list[str]:
    """Return the cells of a result."""
    errors = [run.test_error for run in result.outcomes if run.test_error is not None]
    updates = result.outcomes[0].updates
    num_fragments = parse(result.protocol, WORKERS).streaming.num_fragments
    moved = (updates + (num_fragments - 1) * epochs) / num_fragments * update_bytes
    return [
        f"`{result.protocol}`", f"{result.batch}", f"{result.rate:g}", f"{updates:,}",
        f"{moved / 1e6:,.0f}", f"{result.loss:.4f}",
        f"{min(result.losses):.4f}, {max(result.losses):.4f}", f"{statistics.median(errors):.4f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
