"""How often to average: gradients each step, models every H steps, or models once at the end.

    python bench/averaging.py [--tasks softmax,lenet] [--repeats 1] [--write]

One epoch of the same samples in the same order, in virtual time where every step takes 10 ms and an
exchange nothing, so only the mathematics shows: full-sync averages gradients each step, local-sgd:H
models every H steps, and the last H is all the steps of a worker, so models are averaged once at
the end. The table has the exchanges of each beside its error.

Writes results/averaging.md and a picture for each task.
"""

import argparse
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.config import RunSettings
from paceline.predict.comparison import Contest, compare
from paceline.predict.simulation import World
from paceline.report.compared import Comparison, RunOutcome
from paceline.workloads import load_task
from table import RESULTS, machine, write_table

STEPS = (4, 16, 64)
WORKERS = 4
EVALUATIONS = 8


class Quiet:
    """Prints the start and the result of each run."""

    def began(self, protocol: str, seed: int) -> None:
        print(f"{protocol}, seed {seed} ...", flush=True)

    def progress(self, done: int) -> None:
        return None

    def evaluated(self, epoch: int, at_s: float, metrics: object) -> None:
        return None

    def note(self, text: str) -> None:
        print(text, flush=True)

    def ended(self, outcome: RunOutcome | str) -> None:
        result = outcome if isinstance(outcome, str) else f"accuracy {outcome.best_accuracy}"
        print(f"   {result}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings to train a task with."""

    init: str
    lr: float
    mini_batch_size: int


RECIPES = {
    "softmax": Recipe(init="default", lr=0.1, mini_batch_size=8),
    "lenet": Recipe(init="default", lr=0.5, mini_batch_size=16),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", default="softmax,lenet")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    note, rows, texts = machine(), list[list[str]](), list[str]()
    for name in options.tasks.split(","):
        recipe = RECIPES[name]
        num_samples = len(load_task(name, WORKERS).data().train)  # type: ignore[arg-type]  # a map-style data set has a length
        all_steps = -(-num_samples // (recipe.mini_batch_size * WORKERS))
        rows += rows_of(name, all_steps, options.repeats, write_picture=options.write)
        texts.append(
            f"{name}: {recipe.init} weights, learning rate {recipe.lr:g}, mini-batches of "
            f"{recipe.mini_batch_size}, {num_samples:,} samples, error against virtual time in "
            f"[averaging-{name}.svg](averaging-{name}.svg)."
        )
    if options.write:
        header = ["task", "what is averaged", "protocol", "exchanges", "test error", "test loss"]
        text = f"One epoch, {WORKERS} workers, median of {options.repeats} seeds. "
        text += f"{' '.join(texts)} {note}"
        write_table("averaging", "How often to average", header, rows, text)


def rows_of(name: str, all_steps: int, repeats: int, *, write_picture: bool) -> list[list[str]]:
    """Return the rows of one task, and copy its picture."""
    recipe = RECIPES[name]
    protocols = ("full-sync", *(f"local-sgd:{steps}" for steps in (*STEPS, all_steps)))
    contest = Contest(
        task=name, protocols=protocols, repeats=repeats, is_simulated=True,
        evaluations=EVALUATIONS, world=World(delay=("10ms",)),
        settings=RunSettings(
            workers=WORKERS, mini_batch_size=recipe.mini_batch_size, epochs=1, lr=recipe.lr,
            init=recipe.init,
        ),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare(contest, Quiet(), Path(folder) / "runs")
        rows = [[name, *row] for row in result_rows(comparison, all_steps)]
        if write_picture:
            picture = Path(folder) / "runs" / "comparison.svg"
            shutil.copy(picture, RESULTS / f"averaging-{name}.svg")
    for row in rows:
        print(" | ".join(row), flush=True)
    return rows


def result_rows(comparison: Comparison, all_steps: int) -> list[list[str]]:
    """Return rows with the averaged quantity, the number of exchanges, and the remaining error."""
    rows = []
    for contender in comparison.contenders:
        steps = int(contender.protocol.partition(":")[2] or 0)
        averaged = f"models, every {steps} steps" if steps else "gradients, each step"
        averaged = "models, once at the end" if steps == all_steps else averaged
        errors = [run.test_error for run in contender.outcomes if run.test_error is not None]
        losses = [run.test_loss for run in contender.outcomes if run.test_loss is not None]
        rows.append([
            averaged, f"`{contender.protocol}`", f"{contender.outcomes[0].updates:,}",
            f"{statistics.median(errors):.4f}", f"{statistics.median(losses):.4f}",
        ])  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
