"""`paceline probe` beside tools that measure the same: STREAM, fio, lmbench.

    python bench/probe.py [--rounds 5] [--lmbench FOLDER] [--only NAME ...] [--write]

Both sides take turns, round by round, and the best of each is compared, which is what a ceiling is;
wanted is a difference of at most 15 %. STREAM's copy and triad (McCalpin) stand below as C with
OpenMP, written anew after its rules, and are compiled by gcc; their arrays lie in large pages, as
the probe's do: with small ones a triad is bound by looking pages up. fio is the system's (apt).
lmbench, a checkout of its sources (github.com/intel/lmbench), is compiled into a folder that is
gone afterwards: lat_mem_rd, of which the first megabyte is run, and lat_tcp, whose two processes
taskset holds to the cores that the probe uses. A tool that is not here is a row that says so.
Writes results/probe.md.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.machine.processor import Processor, read_processor
from paceline.machine.source import MachineSource
from paceline.probe.kernels import Kernels, Pass, compiled
from paceline.probe.memory import memory_bytes
from paceline.probe.messages import loopback_figures
from paceline.probe.storage import storage_figures
from table import machine, write_table

WANTED = 0.15
STREAM = r"""
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
double *array(long n) {
  double *made = aligned_alloc(1 << 21, (n * 8 + (1 << 21) - 1) >> 21 << 21);
  madvise(made, n * 8, MADV_HUGEPAGE);
  return made;
}
int main(int argc, char **argv) {
  long n = atol(argv[1]);
  double *a = array(n), *b = array(n), *c = array(n), best[2] = {1e9, 1e9};
#pragma omp parallel for
  for (long i = 0; i < n; i++) a[i] = 1, b[i] = 2, c[i] = 0;
  for (int round = 0; round < 14; round++) {
    double start = omp_get_wtime();
#pragma omp parallel for
    for (long i = 0; i < n; i++) c[i] = a[i];
    double middle = omp_get_wtime();
#pragma omp parallel for
    for (long i = 0; i < n; i++) a[i] = b[i] + 3.0 * c[i];
    double stop = omp_get_wtime();
    if (middle - start < best[0]) best[0] = middle - start;
    if (stop - middle < best[1]) best[1] = stop - middle;
  }
  printf("%.9g %.9g %g\n", 16.0 * n / best[0], 24.0 * n / best[1], a[n / 2]);
}
"""
_FIRST_TLB = 48 * 4096
"""Bytes in small pages that the first look-up table of any processor of today holds: beyond it
lat_mem_rd, which goes to another page with each load, shows what looking pages up takes."""
_STUBS = "int pmap_set(){return 1;} int pmap_unset(){return 1;} int pmap_getport(){return 0;}"
"""What lat_tcp is linked with and never calls, since its port is fixed."""


@dataclass(slots=True)
class Pair:
    """One figure by both sides, round by round."""

    name: str
    unit: str
    ours: Callable[[], float]
    theirs: Callable[[], float | None]
    tool: str
    is_rate: bool
    found: list[tuple[float, float]] = field(default_factory=list)
    missing: str = ""

    def take(self) -> None:
        theirs = self.theirs()
        if theirs is None:
            self.missing = f"no {self.tool} here"
        else:
            self.found.append((self.ours(), theirs))

    def cells(self) -> tuple[str, ...]:
        if not self.found:
            return self.name, self.tool, "-", "-", "-", self.missing
        best = max if self.is_rate else min
        ours, theirs = best(one for one, _ in self.found), best(one for _, one in self.found)
        apart = ours / theirs - 1
        is_near = "yes" if abs(apart) <= WANTED else "no"
        return (
            self.name, self.tool, f"{ours:.4g} {self.unit}", f"{theirs:.4g} {self.unit}",
            f"{apart:+.1%}", is_near,
        )  # fmt: skip


class References:
    """The tools, compiled where they must be."""

    def __init__(self, folder: Path, lmbench: Path | None) -> None:
        self._folder, self._lmbench = folder, lmbench
        self._streamed: dict[str, float] = {}
        self._loads: list[tuple[float, float]] = []
        self._told: set[int] = set()

    def stream(self, name: str, num_bytes: int) -> float | None:
        """GB/s."""
        program = self._folder / "stream"
        if not program.exists():
            if shutil.which("gcc") is None:
                return None
            source = program.with_suffix(".c")
            source.write_text(STREAM)
            _run(["gcc", "-O3", "-march=native", "-fopenmp", str(source), "-o", str(program)])
        if name not in self._streamed:  # one run tells both
            copy, triad, _ = _run([str(program), str(num_bytes // 8)]).split()
            self._streamed = {"copy": float(copy) / 1e9, "triad": float(triad) / 1e9}
        return self._streamed.pop(name)

    def latency_ns(self, num_bytes: int) -> float | None:
        """Of a load, as lat_mem_rd has it for the nearest size; up to a megabyte."""
        program = self._compiled("lat_mem_rd")
        if program is None:
            return None
        if num_bytes in self._told or not self._loads:  # one run tells all sizes
            done = subprocess.run([program, "-P", "1", "-W", "0", "-N", "1", "-t", "1", "64"],
                                  capture_output=True, text=True, check=True)  # fmt: skip
            rows = [line.split() for line in done.stderr.splitlines()]
            self._loads = [
                (float(row[0]) * (1 << 20), float(row[1]))
                for row in rows if len(row) == 2 and row[0][0].isdigit()
            ]  # fmt: skip
            self._told.clear()
        self._told.add(num_bytes)
        return min((abs(size - num_bytes), ns) for size, ns in self._loads)[1]

    def tcp_us(self) -> float | None:
        """One way of a word over loopback: half of what lat_tcp says."""
        program = self._compiled("lat_tcp")
        if program is None or shutil.which("taskset") is None:
            return None
        nowhere = subprocess.DEVNULL  # the server stays, and would hold a pipe open
        here, there = (["taskset", "-c", str(core)] for core in sorted(os.sched_getaffinity(0))[:2])
        subprocess.run([*there, program, "-s"], stdout=nowhere, stderr=nowhere, check=True)
        time.sleep(0.5)
        asked = [*here, program, "-N", "3", "localhost"]
        done = subprocess.run(asked, capture_output=True, text=True)
        _run([program, "-S", "localhost"])
        said = re.search(r"localhost: ([\d.]+) microseconds", done.stderr + done.stdout)
        return float(said[1]) / 2 if said else None

    def _compiled(self, name: str) -> str | None:
        program = self._folder / name
        if self._lmbench is None:
            return None
        if not program.exists():
            source, headers = self._lmbench / "src", self._folder / "headers" / "rpc"
            headers.mkdir(parents=True, exist_ok=True)
            for empty in ("rpc.h", "types.h"):
                (headers / empty).touch()
            (self._folder / "stubs.c").write_text(_STUBS)
            parts = ("mem", "timing", "stats", "sched", "debug", "tcp", "unix", "udp")
            files = [source / f"{name}.c", *(source / f"lib_{one}.c" for one in parts)]
            flags = [f"-DHAVE_{one}" for one in ("uint", "int64_t", "socklen_t")]
            _run(["gcc", "-O2", "-w", *flags, f"-I{headers.parent}", f"-I{source}",
                  *map(str, files), str(source / "getopt.c"), str(self._folder / "stubs.c"),
                  "-o", str(program), "-lm"])  # fmt: skip
        return str(program)

    def fio(self, folder: Path, kind: str) -> float | None:
        """Reads of 4 KiB: median microseconds of one, or thousands a second; 1 MiB: GB/s."""
        if shutil.which("fio") is None:
            return None
        block, jobs, rw = {
            "single": ("4k", 1, "randread"), "many": ("4k", 32, "randread"),
            "large": ("1m", 8, "read"),
        }[kind]  # fmt: skip
        file = folder / "fio.data"
        each = f"{512 // jobs}m"
        parts = [f"--offset_increment={each}", f"--size={each}"] if rw == "read" else []
        said = json.loads(_run([
            "fio", f"--name={kind}", f"--filename={file}", "--size=512m", "--direct=1",
            "--ioengine=psync", f"--rw={rw}", f"--bs={block}", f"--numjobs={jobs}", "--thread",
            "--group_reporting", "--time_based", "--runtime=2", "--output-format=json",
            *parts,
        ]))["jobs"][0]["read"]  # fmt: skip
        if kind == "single":
            return float(said["clat_ns"]["percentile"]["50.000000"]) / 1e3
        return float(said["iops"]) / 1e3 if kind == "many" else float(said["bw_bytes"]) / 1e9


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pairs(
    kernels: Kernels, processor: Processor, tools: References, folder: Path
) -> Iterator[Pair]:
    """What both sides can measure."""
    caches = [one for one in processor.caches if not one.kind.endswith("i")]
    sizes = {one.kind: one.num_bytes for one in caches}
    most, cores = memory_bytes(caches), processor.usable_cores
    for kind in ("L1d", "L2"):
        size = min(sizes.get(kind, 0) // 2, _FIRST_TLB)
        if size > 0:
            chase = partial(kernels.chase, size, 1_000_000, is_huge=False)
            yield Pair(
                f"{kind}, one load", "ns", partial(_least_ns, chase),
                partial(tools.latency_ns, size), "lmbench lat_mem_rd", False,
            )  # fmt: skip
    for what in (Pass.COPY, Pass.TRIAD):
        name = what.name.lower()
        yield Pair(
            f"memory, {name} by {cores} cores", "GB/s",
            partial(_most_gb, partial(kernels.stream, what, most, cores, 14)),
            partial(tools.stream, name, most), "STREAM", True,
        )  # fmt: skip
    for name, key, kind, unit, factor, is_rate in (
        ("disk, one 4 KiB", "disk_read_latency_s", "single", "us", 1e6, False),
        ("disk, many 4 KiB", "disk_reads_per_s", "many", "thousand/s", 1e-3, True),
        ("disk, 1 MiB", "disk_read_bytes_per_s", "large", "GB/s", 1e-9, True),
    ):
        yield Pair(
            name, unit,
            partial(_scaled, kernels, folder, key, factor),
            partial(tools.fio, folder, kind), "fio", is_rate,
        )  # fmt: skip
    yield Pair(
        "loopback, a byte one way", "us",
        lambda: (next(iter(loopback_figures(kernels))).best or 0.0) * 1e6,
        tools.tcp_us, "lmbench lat_tcp", False,
    )  # fmt: skip


def _least_ns(measure: Callable[[], list[float]]) -> float:
    return min(measure()) * 1e9


def _most_gb(measure: Callable[[], list[float]]) -> float:
    return max(measure()) / 1e9


def _scaled(kernels: Kernels, folder: Path, key: str, factor: float) -> float:
    return _disk(kernels, folder)[key] * factor


def _disk(kernels: Kernels, folder: Path) -> dict[str, float]:
    """The medians of its rounds: fio tells one of two seconds, and not the best of many."""
    return {one.key: one.median or 0.0 for one in storage_figures(kernels, folder)}


@contextmanager
def _folder() -> Iterator[Path]:
    """On the disk that is measured: here."""
    with tempfile.TemporaryDirectory(dir=Path(), prefix=".probe-") as folder:
        yield Path(folder).absolute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lmbench", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    where = machine()
    with _folder() as folder, compiled() as kernels:
        tools = References(folder, arguments.lmbench)
        found = list(pairs(kernels, read_processor(MachineSource()), tools, folder))
        if arguments.only:
            found = [one for one in found if any(word in one.name for word in arguments.only)]
        for number in range(arguments.rounds):
            for one in found:
                print(f"round {number}: {one.name}", file=sys.stderr)
                one.take()
    header = ("figure", "tool", "paceline probe", "the tool", "apart", f"within {WANTED:.0%}")
    rows = [one.cells() for one in found]
    print("\n".join(" | ".join(row) for row in (header, *rows)))
    note = (
        f"{where}. Best of {arguments.rounds} rounds in turns. Disk: O_DIRECT, the median of a "
        "round; one read: half take no longer; many: 32 threads; large: 1 MiB by 8 threads."
    )
    if arguments.write:
        write_table("probe", "The probe beside other tools", header, rows, note)


if __name__ == "__main__":
    main()
