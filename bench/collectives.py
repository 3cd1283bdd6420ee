"""The sum of two processes: through shared memory, as runs make it, beside gloo; and on paper.

    python bench/collectives.py [--rounds 12] [--write]

shared    each process has its numbers in its slot of memory that both map, as the hooks of a run
          leave gradients there; a barrier, each averages its half of both slots, a barrier: the
          sum lies where both read it (exchange/shares.py does this between two optimizer steps)
copied    the same from private memory and back into it, as an all-reduce in place promises
gloo      torch.distributed.all_reduce in place
Open MPI  MPI_Allreduce in place by mpi4py, where both are installed
copying   both processes copy private memory at the same time: what this machine moves

In turn, several of each; median of the slower process. Then every schedule of `collectives/` for 1
to 17 ranks: proved on sets of contributors, on numbers of 0 to 1000 elements, the formula beside
the interpreter of costs, and on recorded machines the share of what their narrowest cut allows and
the rings that a search of all orders finds. Writes results/collectives.md; ends with 1 if a proof
fails. What schedules take between processes is `paceline bench collectives`.
"""

import argparse
import itertools
import math
import multiprocessing
import random
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

from paceline.collectives import COLLECTIVES, parse
from paceline.collectives.base import Collective, LinkCost
from paceline.collectives.choose import candidates
from paceline.collectives.cost import cost_between_equals
from paceline.collectives.optimum import share_of_optimum
from paceline.collectives.proof import on_numbers, prove
from paceline.collectives.ring_search import find_rings, planned_rings
from paceline.collectives.topology import RECORDED, Topology
from paceline.collectives.transfers import Operation
from paceline.errors import ConfigError
from paceline.exchange.base import Clock
from paceline.exchange.rounds import Barrier
from paceline.store.control import Control, control_bytes
from paceline.store.means import average_into
from paceline.store.memory import SharedMemory
from table import interval, machine, spread, write_table

MB = 10**6
WANTED = {1 * MB: 5.0, 4 * MB: 5.0, 64 * MB: 2.4, 128 * MB: 2.4}
"""Size -> how many times as fast as gloo a run's sum is."""
WANTED_SHARE = 0.7
WARM_UP = 3
MOST_RANKS = 17
MOST_OFF = 0.01
LENGTHS = (0, 1, 2, 7, 16, 17, 100, 1000)


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
    count = max(3, 40 * MB // size)
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


# -- on paper -------------------------------------------------------------------------------------


def on_paper() -> list[list[str]]:
    return [*map(schedule_row, COLLECTIVES), *optimum_rows(), *ring_rows()]


def members_of(name: str) -> list[Collective]:
    """The members of this name for 1 to 17 ranks."""
    found = []
    for ranks in range(1, MOST_RANKS + 1):
        texts = [one for one in candidates(ranks, late=0) if one.partition(":")[0] == name]
        for text in texts:
            try:
                found.append(parse(text, ranks))
            except ConfigError:
                continue  # not for so many
    return found


def schedule_row(name: str) -> list[str]:
    """Proofs, sums of whole numbers, and costs of all its members."""
    members, rng = members_of(name), random.Random(0)
    num_sums, furthest = 0, 0.0
    link = LinkCost(latency_s=2e-5, s_per_byte=1e-9)
    for member in members:
        prove(member, Operation.ALL_REDUCE)
        for length in LENGTHS:
            buffers = [
                [rng.randrange(-99, 99) for _ in range(length)] for _ in range(member.num_ranks)
            ]
            wanted = [sum(column) for column in zip(*buffers, strict=True)]
            if any(one != wanted for one in on_numbers(member, Operation.ALL_REDUCE, buffers)):
                sys.exit(f"{member} of {member.num_ranks}: another sum of {length} numbers")
            num_sums += 1
        size = 4 * 5040 * member.num_ranks**2
        formula = member.formula_s(Operation.ALL_REDUCE, size, link)
        cost = cost_between_equals(member, Operation.ALL_REDUCE, size, link).seconds
        if cost or formula:
            off = formula / cost - 1
            if member.is_bound and off < -MOST_OFF:
                sys.exit(f"{member} of {member.num_ranks} takes more than its bound")
            furthest = max(furthest, abs(off))
    ranks = sorted({member.num_ranks for member in members})
    what = f"{name}: all-reduce for {ranks[0]} to {ranks[-1]} ranks, {len(members)} schedules"
    kind = COLLECTIVES[name]
    formula_is = "bound above" if kind.is_bound else "formula off"
    proved = f"proved, {num_sums} sums right; {formula_is} its costs by at most {furthest:.1%}"
    if kind.is_bound:
        return [what, proved, "all, none above its bound", "yes"]
    return [what, proved, f"all, <= {MOST_OFF:.0%}", "yes" if furthest <= MOST_OFF else "no"]


def optimum_rows() -> list[list[str]]:
    """What the best schedule reaches of the bound of the narrowest cut."""
    rows = []
    for topology in recorded():
        ranks = topology.num_ranks
        members = [*(parse(text, ranks) for text in candidates(ranks)), planned_rings(topology)]
        shares = {
            str(one): share_of_optimum(topology, one, Operation.ALL_REDUCE) for one in members
        }
        best = sorted(shares, key=lambda one: -shares[one])[:3]
        text = ", ".join(f"{one} {shares[one]:.2f}" for one in best)
        rows.append([f"{topology.name}: share of its optimum", text, "", ""])
    return rows


def recorded() -> list[Topology]:
    return [one for several in RECORDED.values() for one in several]


def ring_rows() -> list[list[str]]:
    """The widest ring that the search finds, beside that of all orders of the ranks."""
    rows = []
    for topology in recorded():
        found, best = find_rings(topology).total_bytes_per_s, widest(topology)
        text = f"{found / 1e9:.3g} GB/s; of all {math.factorial(topology.num_ranks - 1):,} orders "
        rows.append([
            f"{topology.name}: widest ring", text + f"{best / 1e9:.3g}", "equal",
            "yes" if math.isclose(found, best) else "no",
        ])  # fmt: skip
    return rows


def widest(topology: Topology) -> float:
    """By every order: the narrowest of its hops, each link shared by the hops that pass it."""
    best = 0.0
    for rest in itertools.permutations(range(1, topology.num_ranks)):
        load: dict[int, int] = {}
        ring = (0, *rest)
        for one, other in zip(ring, (*rest, 0), strict=True):
            for link in topology.way(one, other):
                load[link] = load.get(link, 0) + 1
        best = max(best, min(topology.links[link].bytes_per_s / n for link, n in load.items()))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    rows = [*between_two(options.rounds), *open_mpi()]
    for row in rows:
        print(" | ".join(row), flush=True)
    for row in on_paper():
        rows.append(row)
        print(" | ".join(row), flush=True)
    if options.write:
        title = "Sums between processes, and schedules on paper"
        header = ["what", "measured", "wanted", "reached"]
        write_table("collectives", title, header, rows, f"{options.rounds} rounds in turn. {note}")


if __name__ == "__main__":
    main()
