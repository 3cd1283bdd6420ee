"""Seconds a step: Paceline against DDP over gloo at its best settings, and one process.

    python bench/step.py [--pairs 9] [--quick]

Two workers (one thread each) against DDP with two processes (one thread each) and one process
with two threads; fp32, eager, the same batches, SGD with momentum. Blocks are interleaved.
Writes results/step.md.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from table import machine, spread, write_table
from worlds import World

CASES = {("mlp", 32): 60, ("mlp", 128): 40, ("mlp", 256): 30, ("lenet", 256): 40}
"""(model, global batch) -> steps a block."""
WANTED = {("mlp", 32): 1.7, ("mlp", 128): 1.4, ("mlp", 256): 1.2, ("lenet", 256): 1.03}


def measure(model: str, batch: int, steps: int, pairs: int) -> list[str]:
    total = steps * (pairs + 1)
    roles = ("pace", "ddp", "one")
    worlds = {
        role: World(role, model=model, batch=batch, total=total, tune=steps // 4 * (role == "ddp"))
        for role in roles
    }
    times: dict[str, list[float]] = {role: [] for role in roles}
    for number in range(pairs + 1):
        for role in roles if number % 2 else reversed(roles):
            seconds = worlds[role].steps(steps)
            if number:
                times[role].append(1000 * seconds / steps)
    best = worlds["ddp"].best
    finals = {role: world.end() for role, world in worlds.items()}
    gap = max(
        float((a - b).abs().max()) for a, b in zip(finals["pace"], finals["ddp"], strict=True)
    )
    ratios = [a / b for a, b in zip(times["ddp"], times["pace"], strict=True)]
    return [
        f"{model} {batch}", spread(times["pace"]), spread(times["ddp"]),
        f"{best[0]} MB, view {best[1]}, static {best[2]}", spread(times["one"]), spread(ratios),
        f">= {WANTED[model, batch]}",
        "yes" if statistics.median(ratios) >= WANTED[model, batch] else "no", f"{gap:.1e}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    header = [
        "model, global batch", "Paceline ms a step", "DDP gloo ms a step", "DDP's best settings",
        "one process, 2 threads, ms", "images/s, Paceline : DDP", "wanted", "reached",
        "largest difference of final parameters",
    ]  # fmt: skip
    rows = []
    for (model, batch), steps in CASES.items():
        if options.only in f"{model}{batch}":
            rows.append(measure(model, batch, steps, options.pairs))
            print(" | ".join(rows[-1]), flush=True)
    note = f"{options.pairs} interleaved blocks of each; median (least to most). {machine()}"
    if options.write:
        write_table("step", "Seconds a step", header, rows, note)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
