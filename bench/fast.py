"""One worker: the plain loop against the same with ``--fast auto``, in one process, in turn.

    python bench/fast.py [--only lenet] [--rounds 20] [--updates 200] [--write]

Each network in a process of its own: the loop that everybody writes, the same with the four lines
and ``fast="auto"`` (nothing is remembered from before), and the plain loop again (A/A). After the
trial and the first, compiling steps they take blocks of steps in turn. Then 200 updates from the
same parameters on the same batches, both ways: the largest difference of their losses. All cores,
batch 256, Fashion-MNIST's shape, fp32. Writes results/fast.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from overhead import make_data, ratios
from paceline.context import Context
from paceline.data.arrays import ArrayDataset, collate_batch
from paceline.sessions.solo import SoloSession
from paceline.worker import Pace
from paceline.workloads import load_task
from table import interval, machine, spread, write_table

BATCH, LEARNING_RATE = 256, 0.05
BLOCKS = {"lenet": 5, "mlp": 5, "resnet18": 1}
"""Network -> steps a block."""
WANTED = {"lenet": 1.4, "mlp": 0.99, "resnet18": 0.99}
Step = Callable[[], Tensor]
loss_of = nn.functional.cross_entropy


def parts(name: str, data: ArrayDataset) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = load_task(name, 1, "default").model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return model, optimizer, DataLoader(data, batch_size=BATCH, collate_fn=collate_batch)


class Plain:
    """What everybody writes."""

    notes: tuple[str, ...] = ()

    def __init__(self, name: str, data: ArrayDataset) -> None:
        self.threads = len(os.sched_getaffinity(0))
        torch.set_num_threads(self.threads)
        self.step = self._loop(*parts(name, data)).__next__

    def _loop(self, model: nn.Module, optimizer: Any, loader: Any) -> Iterator[Tensor]:
        while True:
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                yield loss.detach()


class Fast:
    """The same with the four lines."""

    def __init__(self, name: str, data: ArrayDataset, fast: str = "auto") -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        pace = Pace(SoloSession(), Context())
        model, optimizer, loader = pace.prepare(*parts(name, data), fast=fast)
        self.threads = torch.get_num_threads()
        self.notes = pace._prepared.settled.notes
        self.step = self._loop(pace, model, optimizer, loader).__next__

    def _loop(self, pace: Pace, model: nn.Module, optimizer: Any, loader: Any) -> Iterator[Tensor]:
        for _ in pace.epochs(1_000_000):
            for inputs, targets in loader:
                with pace.step():
                    optimizer.zero_grad()
                    loss = loss_of(model(inputs), targets)
                    loss.backward()
                    optimizer.step()
                yield loss.detach()


def block_s(loop: Plain | Fast, num_steps: int) -> float:
    if torch.get_num_threads() != loop.threads:
        torch.set_num_threads(loop.threads)
        loop.step()
    start_s = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    return (time.perf_counter() - start_s) / num_steps


def measure(name: str, rounds: int, updates: int) -> dict[str, Any]:
    """In this process: the seconds of all blocks, what was found, and the losses' difference."""
    data = make_data(BATCH * 40)
    start_s = time.perf_counter()
    fast = Fast(name, data)
    trial_s = time.perf_counter() - start_s
    loops: dict[str, Plain | Fast] = {
        "fast": fast, "bare": Plain(name, data), "bare again": Plain(name, data)
    }  # fmt: skip
    first_s = block_s(fast, 1)
    times: dict[str, list[float]] = {one: [] for one in loops}
    for number in range(rounds + 1):
        order = list(loops)
        for one in (*order[number % 3 :], *order[: number % 3]):
            seconds = block_s(loops[one], BLOCKS[name])
            if number:
                times[one].append(seconds)
    updates = updates if BLOCKS[name] > 1 else updates // 40
    gap = largest_gap(name, data, updates)
    return {"times": times, "notes": fast.notes, "trial": trial_s, "first": first_s, "gap": gap,
            "updates": updates}  # fmt: skip


def largest_gap(name: str, data: ArrayDataset, updates: int) -> float:
    """Between the losses of both ways, from the same parameters on the same batches."""
    losses = []
    for make in (Plain, Fast):  # what was found is remembered now
        loop = make(name, data)
        losses.append([float(loop.step()) for _ in range(updates)])
    return max(abs(a - b) for a, b in zip(*losses, strict=True))


def row(name: str, found: dict[str, Any]) -> list[str]:
    times = {key: [1000 * one for one in values] for key, values in found["times"].items()}
    gains = {
        "fast": [1 / one for one in ratios(times, "fast")],
        "bare again": [1 / one for one in ratios(times, "bare again")],
    }
    middle, low, high = interval(gains["fast"])
    same, same_low, same_high = interval(gains["bare again"])
    is_reached = middle >= WANTED[name] and found["gap"] <= 1e-4
    return [
        f"{name}, {BATCH}", spread(times["bare"]), spread(times["fast"]),
        f"{middle:.3f} ({low:.3f} to {high:.3f})",
        f"{same:.3f} ({same_low:.3f} to {same_high:.3f})",
        f"{found['gap']:.1e} over {found['updates']}", f"{found['trial']:.0f}",
        f"{found['first']:.0f}", f">= {WANTED[name]}", "yes" if is_reached else "no",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--updates", type=int, default=200, help="on which losses are compared")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--here", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.here, options.rounds, options.updates)))
        return
    note = machine()
    header = [
        "network, batch", "plain ms a step", "fast ms a step", "plain : fast (95 % interval)",
        "plain : plain again", "largest difference of losses, updates", "trial s",
        "first step s (compiles)", "wanted", "reached",
    ]  # fmt: skip
    rows, said = [], []
    for name in BLOCKS:
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rounds = options.rounds if BLOCKS[name] > 1 else max(4, options.rounds // 3)
            command = [sys.executable, __file__, "--here", name, "--rounds", str(rounds),
                       "--updates", str(options.updates)]  # fmt: skip
            done = subprocess.run(
                command, env={**os.environ, "XDG_CACHE_HOME": folder}, check=True,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append(row(name, found))
        said += [f"    {name}: {line}" for line in found["notes"][:-1]]
        print(" | ".join(rows[-1]), *found["notes"], sep="\n", flush=True)
    if options.write:
        note = "\n".join(["What was found:", "", *said, "", note])
        write_table("fast", "One worker with --fast auto", header, rows, note)


if __name__ == "__main__":
    main()
