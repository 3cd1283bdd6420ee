"""Adaptive K against every fixed K: virtual time to a target training loss.

    python bench/adaptive.py [--quick] [--write] [--only exp|shifted|pareto|trace] [--curves]

Softmax regression with real gradients in virtual time, 8 workers, mini-batches of 4, learning rate
0.05, under k-async:K for K = 1 to 8 and under adaptive. The delays are exp:1s, 500ms+exp:500ms,
pareto:2,500ms and the steps of a live run of two workers, recorded first. The loss is that of
1,000 training samples at the newest version, evaluated after every 16 pushes; a target is reached
when the mean of the last four evaluations is below it. Two targets: one that noise hardly affects,
and one that only large K get well below. 20 seeds; the ratio is that of the mean times to the fixed
K that was best over all seeds, with the standard error of the paired ratio.

Writes results/adaptive.md.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from paceline.conditions.delays import parse_delay
from paceline.conditions.world import Conditions
from paceline.core.ledger import Ledger
from paceline.predict.simulation import World
from paceline.protocols import parse
from paceline.simulation.engine import SimulatedRun
from paceline.simulation.model import first_samples
from paceline.simulation.training import TrainingWork
from paceline.workloads import load_task
from quiet_runs import run_in
from table import machine, write_table

Row = list[str]
WORKERS, MINI_BATCH, LEARNING_RATE = 8, 4, 0.05
DELAYS = {"exp": "exp:1s", "shifted": "500ms+exp:500ms", "pareto": "pareto:2,500ms"}
TARGETS = (0.85, 0.70)
NUM_SEEDS, PROBE_SAMPLES, NUM_EVALUATIONS = 20, 1_000, 4
MAX_PUSHES, PUSHES_AN_EVALUATION = 2_400, 16
WANTED = 1.05
PROTOCOLS = (*(f"k-async:{k}" for k in range(1, WORKERS + 1)), "adaptive")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--curves", action="store_true", help="print the loss at set times instead of comparing"
    )
    parser.add_argument("--only", choices=[*DELAYS, "trace"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    note = machine()
    rows: list[list[str]] = []
    for name in (*DELAYS, "trace"):
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                world = conditions_of(name, Path(folder))
                if options.curves:
                    show_curves(world)
                    continue
                for row in compare(world, range(3 if options.quick else NUM_SEEDS)):
                    rows.append([f"{name}: {row[0]}", *row[1:]])
                    print(" | ".join(rows[-1]), flush=True)
    if options.write:
        header = ["delays: target", "best fixed K", "seconds", "adaptive, seconds", "ratio",
                  "wanted", "reached"]  # fmt: skip
        write_table("adaptive", "Adaptive K beside every fixed K", header, rows, note)


def conditions_of(name: str, folder: Path) -> Conditions:
    if name in DELAYS:
        return Conditions(delays=(parse_delay(DELAYS[name]),) * WORKERS)
    run_in(folder, "softmax", workers=2, protocol="k-batch-async:2", path="store",
           mini_batch_size=64, updates=600)  # fmt: skip
    return World(like=folder, cores=WORKERS).conditions(WORKERS)


def compare(conditions: Conditions, seeds: range) -> Iterator[Row]:
    """Compare adaptive with the best fixed K for each target."""
    curves = {
        text: [curve(text, replace(conditions, seed=seed)) for seed in seeds] for text in PROTOCOLS
    }
    for target in TARGETS:
        times_s = {
            text: [reached_s(points, target) for points in curves[text]] for text in PROTOCOLS
        }
        best_fixed = min(PROTOCOLS[:-1], key=lambda text: statistics.fmean(times_s[text]))
        fixed_s, adaptive = times_s[best_fixed], times_s["adaptive"]
        ratio = statistics.fmean(adaptive) / statistics.fmean(fixed_s)
        yield [
            f"{target:g}", best_fixed, _format_mean(fixed_s), _format_mean(adaptive),
            f"{ratio:.3f} +- {ratio_error(adaptive, fixed_s):.3f}", f"<= {WANTED}",
            "yes" if ratio <= WANTED else "no",
        ]  # fmt: skip


def ratio_error(adaptive: list[float], fixed: list[float]) -> float:
    """Return the standard error of the ratio of the means, pair by pair (delta method)."""
    ratio = statistics.fmean(adaptive) / statistics.fmean(fixed)
    residuals = [a - ratio * b for a, b in zip(adaptive, fixed, strict=True)]
    return statistics.stdev(residuals) / (math.sqrt(len(residuals)) * statistics.fmean(fixed))


def curve(text: str, conditions: Conditions) -> list[tuple[float, float]]:
    """Return virtual seconds and loss, after every 16 pushes, until the last target is reached."""
    task, protocol = load_task("softmax"), parse(text, WORKERS)
    size = MINI_BATCH * protocol.num_pushes
    work = TrainingWork(task, protocol, batch_size=size, lr=LEARNING_RATE, seed=conditions.seed)
    ledger = Ledger(work.num_samples, size, protocol.num_pushes)
    run = SimulatedRun(protocol, ledger, conditions, work=work)
    inputs, targets = first_samples(work.splits.train, PROBE_SAMPLES)
    points: list[tuple[float, float]] = []
    while run.counts.pushes < MAX_PUSHES:
        before = run.counts.pushes
        while run.counts.pushes < before + PUSHES_AN_EVALUATION:
            run.run(run.counts.updates + 1)
        work.load_newest()
        with torch.no_grad():
            points.append((run.now_s, float(task.loss(work.model(inputs), targets))))
        if reached_s(points[-NUM_EVALUATIONS:], TARGETS[-1]) < math.inf:
            break
    return points


def reached_s(points: list[tuple[float, float]], target: float) -> float:
    """Return when the mean of four evaluations is at most the target; inf if never."""
    for i in range(NUM_EVALUATIONS, len(points) + 1):
        if statistics.fmean(loss for _, loss in points[i - NUM_EVALUATIONS : i]) <= target:
            return points[i - 1][0]
    return math.inf


def show_curves(conditions: Conditions) -> None:
    """Print the loss at set times, as a mean of three seeds, to choose targets."""
    step_s = conditions.mean_step_s(0)
    print("time", *[f"{step_s * 2**i:8.3g}" for i in range(3, 10)])
    for text in PROTOCOLS:
        curves = [curve(text, replace(conditions, seed=seed)) for seed in range(3)]
        cells = []
        for i in range(3, 10):
            losses = [
                statistics.fmean(
                    [loss for at_s, loss in points if at_s <= step_s * 2**i][-8:] or [9]
                )
                for points in curves
            ]
            cells.append(f"{statistics.fmean(losses):8.3f}")
        print(f"{text:12}", *cells, flush=True)


def _format_mean(values: list[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if max(values) < math.inf else 0.0
    return f"{statistics.fmean(values):.4g} +- {error:.2g}"


if __name__ == "__main__":
    main()
