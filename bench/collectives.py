"""The sum of two processes through shared memory, as in a run, against gloo; and on paper.

    python bench/collectives.py [--rounds 12] [--write]

shared    each process has its numbers in its slot of memory that both map, as the hooks of a run
          leave gradients there; a barrier, each averages its half of both slots, a barrier: both
          can read the sum (exchange/shares.py does this between two optimizer steps)
copied    the same from private memory and back into it, as an in-place all-reduce does
gloo      torch.distributed.all_reduce in place
Open MPI  MPI_Allreduce in place by mpi4py, where both are installed
copying   both processes copy private memory at the same time: the machine's bandwidth

In turn, repeated for some hundredths of a second, so that what fits in a cache is there; median of
the slower process. Then the sizes where one schedule takes over from another between processes,
measured and predicted (`paceline bench collectives`), and every schedule of `collectives/` on paper
(on_paper.py). Writes results/collectives.md; exits with 1 if a proof fails.
"""

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from on_paper import on_paper
from paceline.bench.collectives import CollectivesQuestion, measure_collectives
from paceline.collectives.crossings import Crossing
from paceline.collectives.transfers import Operation
from paceline.exchange.base import Clock
from paceline.exchange.rounds import Barrier
from paceline.plan import format_bytes
from paceline.store.control import Control, control_bytes
from paceline.store.means import average_into
from paceline.store.memory import SharedMemory
from table import interval, machine, spread, write_table

MB = 10**6
WANTED = {1 * MB: 5.0, 4 * MB: 5.0, 64 * MB: 2.4, 128 * MB: 2.4}
"""Size -> the wanted speed of a run's sum over that of gloo."""
WANTED_SHARE = 0.7
WARM_UP = 3
CROSSED_RANKS, CROSSED_BYTES = (2, 4), tuple(4**power << 10 for power in range(8))
"""Numbers of processes, and sizes (1 KiB to 16 MiB), at which schedules are compared."""
MAX_CROSSED_ROUNDS = 5


# -- between two processes ------------------------------------------------------------------------


class Buffers:
    """The memory of one of the two processes, and the ways to sum it."""

    def __init__(self, seat: int, page: SharedMemory, arena: SharedMemory, size: int) -> None:
        self.barrier = Barrier(Control(page, 2), seat, Clock())
        count = size // 4
        slots = arena.tensor()[: 3 * size].view(torch.float32).view(3, count)
        self.own, self.out = slots[seat], torch.empty(count)
        self.private = torch.rand(count)
        half = slice(seat * count // 2, (seat + 1) * count // 2)
        self.parts, self.mean = [slots[0][half], slots[1][half]], slots[2][half]
        self.sum = slots[2]

    def shared(self) -> None:
        self.barrier.wait()
        average_into(self.mean, self.parts, (0.5, 0.5))
        self.barrier.wait()

    def copied(self) -> None:
        self.own.copy_(self.private)
        self.shared()
        self.private.copy_(self.sum)

    def gloo(self) -> None:
        dist.all_reduce(self.private)

    def copying(self) -> None:
        self.out.copy_(self.private)


def serve(seat: int, pipe: Any, page: SharedMemory, arena: SharedMemory, rendezvous: str) -> None:
    """Answer each request with seconds an operation; both processes begin at a barrier."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=seat, world_size=2)
    buffers: dict[int, Buffers] = {}
    while (request := pipe.recv()) is not None:
        size, method, count = request
        if size not in buffers:
            buffers.clear()
            buffers[size] = Buffers(seat, page, arena, size)
        buffer = buffers[size]
        step: Callable[[], None] = getattr(buffer, method)
        buffer.private.fill_(1.0)
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(count):
            step()
        pipe.send((time.perf_counter() - start_s) / count)
    dist.destroy_process_group()


class Pair:
    """The two processes."""

    def __init__(self, folder: Path) -> None:
        fork = multiprocessing.get_context("fork")
        page = SharedMemory.create(control_bytes(2))
        arena = SharedMemory.create(3 * max(WANTED))
        self._pipes, self._processes = [], []
        for seat in range(2):
            pipe, child_pipe = fork.Pipe()
            arguments = (seat, child_pipe, page, arena, str(folder / "meeting"))
            self._processes.append(fork.Process(target=serve, args=arguments))
            self._processes[-1].start()
            self._pipes.append(pipe)

    def seconds(self, size: int, method: str, count: int) -> float:
        """Return the seconds of one operation in the slower process."""
        for pipe in self._pipes:
            pipe.send((size, method, count))
        return max(float(pipe.recv()) for pipe in self._pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def between_two(rounds: int) -> list[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder))
        try:
            return [row for size in WANTED for row in rows_of(pair, size, rounds)]
        finally:
            pair.close()


def rows_of(pair: Pair, size: int, rounds: int) -> list[list[str]]:
    methods = ("shared", "gloo", "copied", "copying", "shared again")
    count = max(3, 400 * MB // size)
    times_ms: dict[str, list[float]] = {method: [] for method in methods}
    for number in range(rounds + WARM_UP):
        for method in methods if number % 2 else tuple(reversed(methods)):
            seconds = pair.seconds(size, method.partition(" ")[0], count)
            if number >= WARM_UP:
                times_ms[method].append(1000 * seconds)
    name = f"{size // MB} MB"
    rows = [
        [f"{name}: {method}, ms", spread(times_ms[method], 3), "", ""] for method in methods[:4]
    ]
    speedups = ratios(times_ms["gloo"], times_ms["shared"])
    rows.append(make_row(f"{name}: gloo : shared", speedups, WANTED[size]))
    rows.append(
        [
            f"{name}: gloo : copied",
            format_interval(ratios(times_ms["gloo"], times_ms["copied"])),
            "",
            "",
        ]
    )
    # A process reads two halves and writes one; a copy reads and writes everything.
    share = [0.75 * ratio for ratio in ratios(times_ms["copying"], times_ms["shared"])]
    rows.append(make_row(f"{name}: of what the machine copies", share, WANTED_SHARE))
    again = ratios(times_ms["shared again"], times_ms["shared"])
    rows.append([f"{name}: shared again : shared", format_interval(again), "1 inside", ""])
    return rows


def ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(first, second, strict=True)]


def format_interval(values: Sequence[float]) -> str:
    median, low, high = interval(values)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def make_row(name: str, values: Sequence[float], wanted: float) -> list[str]:
    is_reached = statistics.median(values) >= wanted
    return [name, format_interval(values), f">= {wanted:g}", "yes" if is_reached else "no"]


MPI = """
import sys, time
from mpi4py import MPI
import numpy
world = MPI.COMM_WORLD
for size in map(int, sys.argv[1:]):
    data, count, took = numpy.ones(size // 4, dtype=numpy.float32), max(3, 40_000_000 // size), []
    for _ in range(9):
        world.Barrier()
        start_s = time.perf_counter()
        for _ in range(count):
            world.Allreduce(MPI.IN_PLACE, data)
        took.append(world.allreduce((time.perf_counter() - start_s) / count, MPI.MAX))
    if world.rank == 0:
        print(size, *took[2:])
"""


def open_mpi() -> list[list[str]]:
    """Measure Open MPI by itself, after the others, since its launcher starts the processes."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(MPI)
        file.flush()
        command = ["mpirun", "--allow-run-as-root", "-n", "2", sys.executable, file.name]
        try:
            result = subprocess.run(
                [*command, *map(str, WANTED)], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return [["Open MPI with mpi4py", "not installed", "", ""]]
    rows = []
    for line in result.stdout.splitlines():
        size, *seconds = line.split()
        times = [1000 * float(text) for text in seconds]
        rows.append([f"{int(size) // MB} MB: Open MPI, ms", spread(times, 3), "", ""])
    return rows


# -- where one schedule takes over from another ----------------------------------------------------


def crossing_rows(num_rounds: int) -> list[list[str]]:
    """Compare each crossing of all schedules, measured and predicted."""
    rows = []
    for num_ranks in CROSSED_RANKS:
        results = measure_collectives(
            CollectivesQuestion(
                num_ranks=num_ranks, operation=Operation.ALL_REDUCE, names=(),
                sizes_bytes=CROSSED_BYTES, num_rounds=num_rounds,
            )
        )  # fmt: skip
        crossings = results.crossings()
        near_crossings = [crossing for crossing in crossings if crossing.is_near]
        far_texts = [describe_crossing(crossing) for crossing in crossings if not crossing.is_near]
        text = "; ".join([f"{len(near_crossings)} of {len(crossings)}", *far_texts])
        reached = "no" if far_texts else "yes"
        if not crossings:
            text, reached = "none clearly takes over from another", ""
        title = f"{num_ranks} processes: where one schedule takes over, predicted within a factor"
        rows.append([f"{title} of 2", text, "all", reached])
    return rows


def describe_crossing(crossing: Crossing) -> str:
    """``tree from ring at 64.0 KiB, predicted nowhere``."""
    predicted = (
        "nowhere"
        if crossing.predicted_bytes is None
        else f"at {format_size(crossing.predicted_bytes)}"
    )
    return (
        f"{crossing.above} from {crossing.below} at {format_size(crossing.measured_bytes)}, "
        f"predicted {predicted}"
    )


def format_size(num_bytes: float) -> str:
    return format_bytes(round(num_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    rows = [*between_two(options.rounds), *open_mpi()]
    for row in rows:
        print(" | ".join(row), flush=True)
    for row in (*crossing_rows(min(options.rounds, MAX_CROSSED_ROUNDS)), *on_paper()):
        rows.append(row)
        print(" | ".join(row), flush=True)
    if options.write:
        title = "Sums between processes, and schedules on paper"
        header = ["what", "measured", "wanted", "reached"]
        write_table("collectives", title, header, rows, f"{options.rounds} rounds in turn. {note}")


if __name__ == "__main__":
    main()
