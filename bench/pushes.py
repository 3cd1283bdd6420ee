"""Pushes a second into the store, with a step that computes nothing.

    python bench/pushes.py [--quick] [--write] [--runs N]

Two workers, k-batch-async:1, LeNet's 129,068 parameters, plain SGD, with ledger and trace.
Nothing is computed: each step writes a ready gradient to the worker's slot and pushes it, so every
push is granted, traced, applied by the optimizer and answered with new parameters.

Bytes that must move for one push (S = bytes of the parameters), reads and writes alike:
    gradient written into the slot              S
    gradient read by the update                 S
    parameters read and written by the update  2S
    parameters read and written by the pull    2S
as a share of the bandwidth of two processes that copy blocks of S at the same time, each from its
own source to its own target (2S a copy), in turn with the pushes. Writes results/pushes.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import paceline
from paceline.data.arrays import ArrayDataset, collate_batch
from paceline.program import ScriptProgram
from paceline.workloads.images import build_lenet
from quiet_runs import num_pushes, run, update_times_s
from table import machine, spread, write_table

NUM_SAMPLES = 100_000
"""More than the pushes of any run, so that no epoch ends."""
PASSES_A_PUSH = 6
WANTED_PER_S, WANTED_SHARE = 8_000, 0.4


def run_worker() -> None:
    """Run the README's loop without forward and backward."""
    pace = paceline.connect()
    model = build_lenet("default")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = ArrayDataset(
        torch.zeros(1, 1).expand(NUM_SAMPLES, 1), torch.zeros(1).expand(NUM_SAMPLES)
    )
    loader = DataLoader(data, batch_size=1, collate_fn=collate_batch)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    parameters = list(model.parameters())
    gradients = [torch.full_like(parameter, 1e-3) for parameter in parameters]
    # The first backward makes every .grad a view of this worker's slot; from then on the gradient
    # is written there, as the hooks of a backward do.
    for _ in pace.epochs(1):
        for _ in loader:
            with pace.step():
                if parameters[0].grad is None:
                    torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
                torch._foreach_copy_([parameter.grad for parameter in parameters], gradients)
                optimizer.step()


def pushes_per_s(num_updates: int) -> float:
    program = ScriptProgram(path=str(Path(__file__).resolve()), args=("--worker",))
    records = run(
        program, workers=2, protocol="k-batch-async:1", updates=num_updates, path="store", threads=1
    )
    times_s = update_times_s(records)
    skipped = len(times_s) // 10
    assert num_pushes(records) >= num_updates
    return (len(times_s) - 1 - skipped) / (times_s[-1] - times_s[skipped])


def copy_bytes_per_s(num_bytes: int, seconds: float) -> float:
    """Return the bytes a second read and written by two processes that copy at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder) / "go"
        command = [sys.executable, __file__, "--copy", str(num_bytes), str(seconds), str(gate)]
        copiers = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for copier in copiers:
            assert copier.stdout is not None
            copier.stdout.readline()
        for copier in copiers:
            assert copier.stdin is not None
            copier.stdin.write("go\n")
            copier.stdin.flush()
        return sum(float(copier.communicate()[0]) for copier in copiers)


def run_copier(num_bytes: int, seconds: float) -> None:
    torch.set_num_threads(1)
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    target.copy_(source)
    print("ready", flush=True)
    sys.stdin.readline()
    count, start = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - start) < seconds:
        for _ in range(20):
            target.copy_(source)
        count += 20
    print(2 * num_bytes * count / passed_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    note = machine()
    size = 4 * sum(parameter.numel() for parameter in build_lenet("default").parameters())
    pushes, copies, shares = [], [], []
    for _ in range(1 if options.quick else options.runs):
        copies.append(copy_bytes_per_s(size, 0.5 if options.quick else 3.0))
        pushes.append(pushes_per_s(5_000 if options.quick else 20_000))
        shares.append(pushes[-1] * PASSES_A_PUSH * size / copies[-1])
    rows = [
        ["pushes a second", spread(pushes, 0), f">= {WANTED_PER_S:,}",
         "yes" if statistics.median(pushes) >= WANTED_PER_S else "no"],
        ["copying, two processes, GB/s moved", spread([rate / 1e9 for rate in copies]), "", ""],
        ["share of it that the pushes move", spread(shares), f">= {WANTED_SHARE}",
         "yes" if statistics.median(shares) >= WANTED_SHARE else "no"],
    ]  # fmt: skip
    for row in rows:
        print(" | ".join(row))
    note = (
        f"S = {size:,} bytes; {PASSES_A_PUSH} S must move a push (see bench/pushes.py). "
        f"{len(pushes)} runs in turn with the copying; median (least to most). {note}"
    )
    if options.write:
        write_table(
            "pushes", "Pushes a second", ["what", "measured", "wanted", "reached"], rows, note
        )


if __name__ == "__main__":
    if "--copy" in sys.argv:
        run_copier(int(sys.argv[2]), float(sys.argv[3]))
    elif "--worker" in sys.argv and "WORLD_SIZE" in os.environ:
        run_worker()
    else:
        main()
