"""Pushes and pulls through the key-value store, against a plain copy and gloo's send and receive.

    python bench/kvstore.py [--pairs 9] [--write]

Every variant moves the same tensor. Two processes stay alive for all of them and run block by
block in turn (A B C A B C), so that noise affects all alike. The rows of one process use the first
process alone.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from paceline import KVStore
from table import machine, spread, write_table

SIZES = {4 * 2**10: 4000, 2**20: 400, 2**24: 24}
"""Bytes of the tensor -> operations a block."""
VARIANTS = ("copy", "add", "push", "pull", "gloo")
NAMES = {
    "copy": "plain copy",
    "add": "plain add_ in place",
    "push": "store.push, one key",
    "pull": "store.pull into out",
    "gloo": "gloo send + recv",
}


def make_operation(variant: str, store: KVStore, rank: int, num_bytes: int) -> Callable[[], object]:
    value = torch.ones(num_bytes // 4)
    target = torch.zeros_like(value)
    key = str(num_bytes)
    if variant == "copy":
        return lambda: target.copy_(value)
    if variant == "add":
        return lambda: target.add_(value)
    if variant == "push":
        return lambda: store.push(key, value)
    if variant == "pull":
        return lambda: store.pull(key, out=target)
    if rank == 0:
        return lambda: dist.send(value, 1)
    return lambda: dist.recv(target, 0)


def serve(store: KVStore, rank: int, rendezvous: str, channel: Connection) -> None:
    """Run the requested blocks; answer each with its seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    operations: dict[tuple[str, int], Callable[[], object]] = {}
    while (request := channel.recv()) is not None:
        variant, num_bytes, count = request
        if request[:2] not in operations:
            operations[request[:2]] = make_operation(variant, store, rank, num_bytes)
        run = operations[request[:2]]
        start = time.perf_counter()
        for _ in range(count):
            run()
        channel.send(time.perf_counter() - start)
    dist.destroy_process_group()


def block_rate(channels: list[Connection], variant: str, num_bytes: int) -> float:
    """Return the operations a second of all processes; for gloo, pairs of send and receive."""
    count = SIZES[num_bytes]
    for channel in channels:
        channel.send((variant, num_bytes, count))
    seconds: float = max([channel.recv() for channel in channels])
    return count * (1 if variant == "gloo" else len(channels)) / seconds


def measure(channels: list[Connection], num_bytes: int, pairs: int) -> list[list[str]]:
    cases = [
        (variant, num_processes)
        for num_processes in (1, 2)
        for variant in VARIANTS
        if variant != "gloo" or num_processes == 2
    ]
    rates: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for number in range(pairs + 1):
        for variant, num_processes in cases if number % 2 else reversed(cases):
            rate = block_rate(channels[:num_processes], variant, num_bytes)
            if number:
                rates[variant, num_processes].append(rate)
    rows = []
    for (variant, num_processes), values in rates.items():
        ratios = [a / b for a, b in zip(values, rates["copy", num_processes], strict=True)]
        gigabytes = [rate * num_bytes / 1e9 for rate in values]
        rows.append(
            [
                f"{num_bytes / 2**10:,.0f} KiB", str(num_processes), NAMES[variant],
                spread(values, 0), spread(gigabytes), spread(ratios),
            ]
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine_note, context = machine(), multiprocessing.get_context("spawn")
    header = ["tensor", "processes", "operation", "a second", "GB/s", "speed : plain copy"]
    rows = []
    with tempfile.TemporaryDirectory() as folder, KVStore(num_shards=4) as store:
        for num_bytes in SIZES:
            store.init(str(num_bytes), torch.zeros(num_bytes // 4))
        parent_channels, child_channels = zip(*[context.Pipe() for _ in range(2)], strict=True)
        processes = [
            context.Process(
                target=serve, args=(store, i, str(Path(folder) / "meet"), child_channels[i])
            )
            for i in range(2)
        ]
        for process in processes:
            process.start()
        for num_bytes in SIZES:
            for row in measure(list(parent_channels), num_bytes, options.pairs):
                rows.append(row)
                print(" | ".join(row), flush=True)
        for channel in parent_channels:
            channel.send(None)
        for process in processes:
            process.join()
    note = (
        "Both processes push to the same key. GB/s counts the tensor once an operation; processes "
        f"together. {options.pairs} interleaved blocks of each; median (least to most). "
        f"{machine_note}"
    )
    if options.write:
        write_table("kvstore", "A key-value store in shared memory", header, rows, note)


if __name__ == "__main__":
    main()
