"""The steadiness of this machine: the same LeNet step on every core at once, second by second.

    python bench/steadiness.py [--seconds 60] [--write]

One process a core, pinned to it, with one thread and nothing shared, runs training steps of 64
images. All variation comes from the machine, and bounds the accuracy of any prediction of a live
run of five seconds from the five seconds before it, as in bench/prediction.py. Writes
results/steadiness.md.
"""

import argparse
import multiprocessing
import os
import statistics
import time

import torch

from paceline.workloads import load_task
from table import machine, spread, write_table

BATCH, WINDOW_S = 64, 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, cores = machine(), sorted(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(len(cores)) as pool:
        jobs = [pool.apply_async(step_times_ms, (core, options.seconds)) for core in cores]
        times_ms = [job.get() for job in jobs]
    rows = [
        [f"core {core}, ms a step in each second", spread(row), spread(window_means(row))]
        for core, row in zip(cores, times_ms, strict=True)
    ]
    slowest = [max(column) for column in zip(*times_ms, strict=False)]
    rows.append(["the slower core of each second", spread(slowest), spread(window_means(slowest))])
    core_ratios = [max(column) / min(column) for column in zip(*times_ms, strict=False)]
    rows.append(["slower to faster core", spread(core_ratios), spread(window_means(core_ratios))])
    changes = [
        b / a - 1 for a, b in zip(window_means(slowest), window_means(slowest)[1:], strict=False)
    ]
    rows.append([f"one window of {WINDOW_S} s from the one before, %", "",
                 spread([100 * change for change in changes], 0)])  # fmt: skip
    for row in rows:
        print(" | ".join(row), flush=True)
    if options.write:
        header = ["what", "by second", f"by window of {WINDOW_S} s"]
        write_table("steadiness", "How steady the machine is", header, rows,
                    f"Median (least to most). {note}")  # fmt: skip


def window_means(values: list[float]) -> list[float]:
    return [
        statistics.fmean(values[start : start + WINDOW_S])
        for start in range(0, len(values) - WINDOW_S + 1, WINDOW_S)
    ]


def step_times_ms(core: int, seconds: int) -> list[float]:
    """Return the mean milliseconds of a step, for each second."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    task = load_task("lenet")
    model = task.model()
    optimizer = task.optimizer(model.parameters(), task.learning_rate)
    inputs, targets = torch.rand(BATCH, 1, 28, 28), torch.arange(BATCH) % 10

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(20):
        step()
    means_ms = []
    for _ in range(seconds):
        start_s, num_steps = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - start_s) < 1.0:
            step()
            num_steps += 1
        means_ms.append(1e3 * elapsed_s / num_steps)
    return means_ms


if __name__ == "__main__":
    main()
