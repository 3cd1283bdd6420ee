"""The cost of one worker: the four lines under plain ``python`` against the bare loop.

    python bench/overhead.py [--quick] [--write]

LeNet, batch 256, 60,000 synthetic images, all cores. Three loops live in one process: with the
four lines, bare, and bare again (A/A: what the method shows where there is no difference). They
take blocks of two steps in turn, in random order, so that other load on the machine affects all
three alike. Every 40 rounds all three are rebuilt, in another order, to average the layout of their
memory, too: two bare loops in one process may differ by 1 % for as long as they live. The four
lines are compared with the mean of both bare loops. The run goes on until the 95 % interval of the
median ratio is narrow. Writes results/overhead.md.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.context import Context
from paceline.data.arrays import ArrayDataset, collate_batch
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.workloads.images import build_lenet
from table import interval, machine, spread, write_table

BATCH, STEPS, ROUNDS_A_BUILD = 256, 2, 40
LEARNING_RATE = 0.01
WANTED, HALF_WIDTH = 1.01, 0.002
Step = Callable[[], None]
Makers = dict[str, Callable[[], Step]]
Times = dict[str, list[float]]


def make_data(num_samples: int) -> ArrayDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (num_samples, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return ArrayDataset(images, torch.randint(0, 10, (num_samples,), generator=generator))


def make_parts(data: ArrayDataset) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[object]]:
    torch.manual_seed(0)
    model = build_lenet("default")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader: DataLoader[object] = DataLoader(
        data, batch_size=BATCH, shuffle=True, collate_fn=collate_batch
    )
    return model, optimizer, loader


def bare(data: ArrayDataset) -> Step:
    """Return a step of the plain loop."""
    model, optimizer, loader = make_parts(data)
    loss_fn = nn.CrossEntropyLoss()

    def loop() -> Iterator[None]:
        while True:
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
                yield

    return loop().__next__


def with_four_lines(data: ArrayDataset) -> Step:
    """Return a step of the loop with Paceline, as ``connect`` sets it up under plain ``python``."""
    pace = Pace(SoloExchange(), Context())
    model, optimizer, loader = pace.prepare(*make_parts(data))
    loss_fn = nn.CrossEntropyLoss()

    def loop() -> Iterator[None]:
        for _ in pace.epochs(1_000_000):
            for inputs, targets in loader:
                with pace.step():
                    optimizer.zero_grad()
                    loss_fn(model(inputs), targets).backward()
                    optimizer.step()
                yield

    return loop().__next__


def makers_of(four_lines: Callable[[], Step], plain: Callable[[], Step]) -> Makers:
    """Return the three loops to measure."""
    return {"four lines": four_lines, "bare": plain, "bare again": plain}


def block_s(step: Step) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return time.perf_counter() - start


def measure(makers: Makers, min_pairs: int, limit_s: float) -> Times:
    """Return the seconds of each block, by loop and pair; loops are named as in `makers_of`."""
    times: Times = {name: [] for name in makers}
    rng = random.Random(0)
    end_s = time.perf_counter() + limit_s
    while time.perf_counter() < end_s:
        names = rng.sample(list(makers), len(makers))
        loops = {name: makers[name]() for name in names}
        for step in loops.values():
            block_s(step)
        for _ in range(ROUNDS_A_BUILD):
            order = list(loops)
            rng.shuffle(order)
            for name in order:
                times[name].append(block_s(loops[name]))
        print(f"{len(times['bare'])} pairs", end="\r", flush=True)
        if len(times["bare"]) >= min_pairs:
            _, low, high = interval(by_build(ratios(times, "four lines")))
            if high - low <= 2 * HALF_WIDTH:
                break
    return times


def ratios(times: Times, name: str) -> list[float]:
    """Return the ratio of each pair: four lines to bare loops, or one bare loop to the other."""
    return [a / b for a, b in zip(times[name], bare_s(times, name), strict=True)]


def by_build(pair_ratios: Sequence[float]) -> list[float]:
    """Return the median of each build: pairs of one build share its layout of memory."""
    starts = range(0, len(pair_ratios), ROUNDS_A_BUILD)
    return [statistics.median(pair_ratios[at : at + ROUNDS_A_BUILD]) for at in starts]


def bare_s(times: Times, name: str) -> list[float]:
    """Return the seconds that ``name`` is compared with."""
    if name == "bare again":
        return times["bare"]
    return [(a + b) / 2 for a, b in zip(times["bare"], times["bare again"], strict=True)]


def rows_of(times: Times, title: str = "") -> list[list[str]]:
    """Compare the four lines with both bare loops, and one bare loop with the other."""
    rows = []
    for name, wanted in (("four lines", f"<= {WANTED}"), ("bare again", "1 inside")):
        median, low, high = interval(by_build(ratios(times, name)))
        is_reached = high <= WANTED if name == "four lines" else low <= 1.0 <= high
        rows.append([
            f"{title}{name} : bare", spread([1000 * seconds / STEPS for seconds in times[name]]),
            spread([1000 * seconds / STEPS for seconds in bare_s(times, name)]), f"{median:.4f}",
            f"{low:.4f} to {high:.4f}", str(len(times[name])), wanted,
            "yes" if is_reached else "no",
        ])  # fmt: skip
    return rows


def added_us(times: Times) -> float:
    """Return the microseconds that the four lines add to a step."""
    return 1e6 * statistics.median(
        (a - b) / STEPS
        for a, b in zip(times["four lines"], bare_s(times, "four lines"), strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    load = os.getloadavg()[0]
    note = machine()
    data = make_data(6_000 if options.quick else 60_000)
    makers = makers_of(partial(with_four_lines, data), partial(bare, data))
    times = measure(makers, *((40, 5.0) if options.quick else (400, 180.0)))
    rows = rows_of(times)
    for row in rows:
        print(" | ".join(row), flush=True)
    header = [
        "loops", "ms a step", "bare, ms a step", "median ratio", "95 % interval", "pairs",
        "wanted of the upper end", "reached",
    ]  # fmt: skip
    per_step_us = added_us(times)
    note = (
        f"Blocks of {STEPS} steps in turn; median (least to most); interval of the median by "
        f"bootstrap over the medians of builds, {ROUNDS_A_BUILD} pairs each. The four lines "
        f"add {per_step_us:.0f} us a step. {note}"
    )
    if options.write:
        write_table("overhead", "One worker against the bare loop", header, rows, note)
    print(f"load before {load:.1f}; four lines add {per_step_us:.0f} us a step")


if __name__ == "__main__":
    main()
