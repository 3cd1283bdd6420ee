"""The sum of two processes: through shared memory, as runs make it, beside gloo; and on paper.

    python bench/collectives.py [--rounds 12] [--write]

shared    each process has its numbers in its slot of memory that both map, as the hooks of a run
          leave gradients there; a barrier, each averages its half of both slots, a barrier: the
          sum lies where both read it (exchange/shares.py does this between two optimizer steps)
copied    the same from private memory and back into it, as an all-reduce in place promises
gloo      torch.distributed.all_reduce in place
Open MPI  MPI_Allreduce in place by mpi4py, where both are installed
copying   both processes copy private memory at the same time: what this machine moves

In turn, as many of each as take some hundredths of a second, so that what lies in a cache does;
median of the slower process. Then where one schedule takes over from
another between processes, measured and predicted (`paceline bench collectives`), and every schedule
of `collectives/` on paper (on_paper.py). Writes results/collectives.md; ends with 1 if a proof
fails.
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
"""Size -> how many times as fast as gloo a run's sum is."""
WANTED_SHARE = 0.7
WARM_UP = 3
CROSSED_RANKS, CROSSED_BYTES = (2, 4), tuple(4**power << 10 for power in range(8))
"""Between how many processes schedules are compared, and at which sizes: 1 KiB to 16 MiB."""
MOST_CROSSED_ROUNDS = 5


# -- between two processes ------------------------------------------------------------------------


class Seat:
    """One of the two."""

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


def serve(seat: int, pipe: Any, page: SharedMemory, arena: SharedMemory, meeting: str) -> None:
    """Seconds of what is asked for, each after both have met."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=seat, world_size=2)
    held: dict[int, Seat] = {}
    while (asked := pipe.recv()) is not None:
        size, what, count = asked
        if size not in held:
            held.clear()
            held[size] = Seat(seat, page, arena, size)
        one = held[size]
        step: Callable[[], None] = getattr(one, what)
        one.private.fill_(1.0)
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(count):
            step()
        pipe.send((time.perf_counter() - start_s) / count)
    dist.destroy_process_group()


class Pair:
    """Both processes."""

    def __init__(self, folder: Path) -> None:
        fork = multiprocessing.get_context("fork")
        page = SharedMemory.create(control_bytes(2))
        arena = SharedMemory.create(3 * max(WANTED))
        self._pipes, self._processes = [], []
        for seat in range(2):
            pipe, other = fork.Pipe()
            args = (seat, other, page, arena, str(folder / "meeting"))
            self._processes.append(fork.Process(target=serve, args=args))
            self._processes[-1].start()
            self._pipes.append(pipe)

    def seconds(self, size: int, what: str, count: int) -> float:
        """Of one sum, by the slower of the two."""
        for pipe in self._pipes:
            pipe.send((size, what, count))
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
    ways = ("shared", "gloo", "copied", "copying", "shared again")
    count = max(3, 400 * MB // size)
    took: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + WARM_UP):
        for way in ways if number % 2 else tuple(reversed(ways)):
            seconds = pair.seconds(size, way.partition(" ")[0], count)
            if number >= WARM_UP:
                took[way].append(1000 * seconds)
    name = f"{size // MB} MB"
    rows = [[f"{name}: {way}, ms", spread(took[way], 3), "", ""] for way in ways[:4]]
    times = against(took["gloo"], took["shared"])
    rows.append(judged(f"{name}: gloo : shared", times, WANTED[size]))
    rows.append([f"{name}: gloo : copied", said(against(took["gloo"], took["copied"])), "", ""])
    # A process reads two halves and writes one; a copy reads and writes the whole.
    share = [0.75 * one for one in against(took["copying"], took["shared"])]
    rows.append(judged(f"{name}: of what the machine copies", share, WANTED_SHARE))
    again = against(took["shared again"], took["shared"])
    rows.append([f"{name}: shared again : shared", said(again), "1 inside", ""])
    return rows


def against(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(one, other, strict=True)]


def said(values: Sequence[float]) -> str:
    middle, low, high = interval(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def judged(name: str, values: Sequence[float], wanted: float) -> list[str]:
    is_reached = statistics.median(values) >= wanted
    return [name, said(values), f">= {wanted:g}", "yes" if is_reached else "no"]


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
    """By itself, after the others: its processes are its own launcher's."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(MPI)
        file.flush()
        command = ["mpirun", "--allow-run-as-root", "-n", "2", sys.executable, file.name]
        try:
            done = subprocess.run(
                [*command, *map(str, WANTED)], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return [["Open MPI with mpi4py", "not installed", "", ""]]
    rows = []
    for line in done.stdout.splitlines():
        size, *seconds = line.split()
        times = [1000 * float(one) for one in seconds]
        rows.append([f"{int(size) // MB} MB: Open MPI, ms", spread(times, 3), "", ""])
    return rows


# -- where one schedule takes over from another ----------------------------------------------------


def crossing_rows(num_rounds: int) -> list[list[str]]:
    """Of all schedules between so many processes: each crossing, measured and predicted."""
    rows = []
    for num_ranks in CROSSED_RANKS:
        found = measure_collectives(
            CollectivesQuestion(
                num_ranks=num_ranks, operation=Operation.ALL_REDUCE, names=(),
                sizes_bytes=CROSSED_BYTES, num_rounds=num_rounds,
            )
        )  # fmt: skip
        crossings = found.crossings()
        near = [one for one in crossings if one.is_near]
        far = [said_of(one) for one in crossings if not one.is_near]
        text = "; ".join([f"{len(near)} of {len(crossings)}", *far])
        reached = "no" if far else "yes"
        if not crossings:
            text, reached = "none clearly takes over from another", ""
        what = f"{num_ranks} processes: where one schedule takes over, predicted within a factor"
        rows.append([f"{what} of 2", text, "all", reached])
    return rows


def said_of(one: Crossing) -> str:
    """``tree from ring at 64.0 KiB, predicted nowhere``."""
    predicted = "nowhere" if one.predicted_bytes is None else f"at {size_of(one.predicted_bytes)}"
    return f"{one.above} from {one.below} at {size_of(one.measured_bytes)}, predicted {predicted}"


def size_of(num_bytes: float) -> str:
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
    for row in (*crossing_rows(min(options.rounds, MOST_CROSSED_ROUNDS)), *on_paper()):
        rows.append(row)
        print(" | ".join(row), flush=True)
    if options.write:
        title = "Sums between processes, and schedules on paper"
        header = ["what", "measured", "wanted", "reached"]
        write_table("collectives", title, header, rows, f"{options.rounds} rounds in turn. {note}")


if __name__ == "__main__":
    main()
