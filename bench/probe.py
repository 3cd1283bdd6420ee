"""`paceline probe` against tools that measure the same: STREAM, fio, lmbench.

    python bench/probe.py [--rounds 5] [--lmbench FOLDER] [--only NAME ...] [--write]

Both sides take turns, round by round, and the best of each is compared, since a ceiling is a best
value; wanted is a difference of at most 15 %. STREAM's copy and triad (McCalpin) are below in C
with OpenMP, newly written by its rules, and compiled by gcc; their arrays lie in large pages, as
the probe's do: with small ones page look-ups bound a triad. fio is the system's (apt). lmbench, a
checkout of its sources (github.com/intel/lmbench), is compiled into a temporary folder: lat_mem_rd,
of which the first megabyte is run, and lat_tcp, whose two processes taskset pins to the cores that
the probe uses. A missing tool is reported in its row. Writes results/probe.md.
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
"""Bytes in small pages that the first-level TLB of any current processor covers: beyond it
lat_mem_rd, which goes to another page with each load, measures page look-ups."""
_STUBS = "int pmap_set(){return 1;} int pmap_unset(){return 1;} int pmap_getport(){return 0;}"
"""Functions that lat_tcp is linked with and never calls, since its port is fixed."""


@dataclass(slots=True)
class Pair:
    """One figure measured by both sides, round by round."""

    name: str
    unit: str
    ours: Callable[[], float]
    theirs: Callable[[], float | None]
    tool: str
    is_rate: bool
    figures: list[tuple[float, float]] = field(default_factory=list)
    missing: str = ""

    def measure(self) -> None:
        theirs = self.theirs()
        if theirs is None:
            self.missing = f"no {self.tool} here"
        else:
            self.figures.append((self.ours(), theirs))

    def cells(self) -> tuple[str, ...]:
        if not self.figures:
            return self.name, self.tool, "-", "-", "-", self.missing
        best = max if self.is_rate else min
        ours, theirs = best(a for a, _ in self.figures), best(b for _, b in self.figures)
        difference = ours / theirs - 1
        is_near = "yes" if abs(difference) <= WANTED else "no"
        return (
            self.name, self.tool, f"{ours:.4g} {self.unit}", f"{theirs:.4g} {self.unit}",
            f"{difference:+.1%}", is_near,
        )  # fmt: skip


class References:
    """The other tools, compiled where necessary."""

    def __init__(self, folder: Path, lmbench: Path | None) -> None:
        self._folder, self._lmbench = folder, lmbench
        self._stream_rates: dict[str, float] = {}
        self._loads: list[tuple[float, float]] = []
        self._reported_sizes: set[int] = set()

    def stream(self, name: str, num_bytes: int) -> float | None:
        """GB/s."""
        binary = self._folder / "stream"
        if not binary.exists():
            if shutil.which("gcc") is None:
                return None
            source = binary.with_suffix(".c")
            source.write_text(STREAM)
            _run(["gcc", "-O3", "-march=native", "-fopenmp", str(source), "-o", str(binary)])
        if name not in self._stream_rates:  # one run measures both
            copy, triad, _ = _run([str(binary), str(num_bytes // 8)]).split()
            self._stream_rates = {"copy": float(copy) / 1e9, "triad": float(triad) / 1e9}
        return self._stream_rates.pop(name)

    def latency_ns(self, num_bytes: int) -> float | None:
        """Return the latency of a load, by lat_mem_rd at the nearest size; up to a megabyte."""
        program = self._compiled("lat_mem_rd")
        if program is None:
            return None
        if num_bytes in self._reported_sizes or not self._loads:  # one run measures all sizes
            result = subprocess.run([program, "-P", "1", "-W", "0", "-N", "1", "-t", "1", "64"],
                                    capture_output=True, text=True, check=True)  # fmt: skip
            rows = [line.split() for line in result.stderr.splitlines()]
            self._loads = [
                (float(row[0]) * (1 << 20), float(row[1]))
                for row in rows if len(row) == 2 and row[0][0].isdigit()
            ]  # fmt: skip
            self._reported_sizes.clear()
        self._reported_sizes.add(num_bytes)
        return min((abs(size - num_bytes), ns) for size, ns in self._loads)[1]

    def tcp_us(self) -> float | None:
        """Return the time of a word over loopback, one way: half of the result of lat_tcp."""
        program = self._compiled("lat_tcp")
        if program is None or shutil.which("taskset") is None:
            return None
        devnull = subprocess.DEVNULL  # the server stays and would keep a pipe open
        client, server = (
            ["taskset", "-c", str(core)] for core in sorted(os.sched_getaffinity(0))[:2]
        )
        subprocess.run([*server, program, "-s"], stdout=devnull, stderr=devnull, check=True)
        time.sleep(0.5)
        command = [*client, program, "-N", "3", "localhost"]
        result = subprocess.run(command, capture_output=True, text=True)
        _run([program, "-S", "localhost"])
        match = re.search(r"localhost: ([\d.]+) microseconds", result.stderr + result.stdout)
        return float(match[1]) / 2 if match else None

    def _compiled(self, name: str) -> str | None:
        program = self._folder / name
        if self._lmbench is None:
            return None
        if not program.exists():
            source, headers = self._lmbench / "src", self._folder / "headers" / "rpc"
            headers.mkdir(parents=True, exist_ok=True)
            for header in ("rpc.h", "types.h"):
                (headers / header).touch()
            (self._folder / "stubs.c").write_text(_STUBS)
            libraries = ("mem", "timing", "stats", "sched", "debug", "tcp", "unix", "udp")
            files = [source / f"{name}.c", *(source / f"lib_{part}.c" for part in libraries)]
            flags = [f"-DHAVE_{kind}" for kind in ("uint", "int64_t", "socklen_t")]
            _run(["gcc", "-O2", "-w", *flags, f"-I{headers.parent}", f"-I{source}",
                  *map(str, files), str(source / "getopt.c"), str(self._folder / "stubs.c"),
                  "-o", str(program), "-lm"])  # fmt: skip
        return str(program)

    def fio(self, folder: Path, kind: str) -> float | None:
        """Measure reads of 4 KiB: median us of one, or thousands a second; of 1 MiB: GB/s."""
        if shutil.which("fio") is None:
            return None
        block, jobs, rw = {
            "single": ("4k", 1, "randread"), "many": ("4k", 32, "randread"),
            "large": ("1m", 8, "read"),
        }[kind]  # fmt: skip
        file = folder / "fio.data"
        job_size = f"{512 // jobs}m"
        job_flags = [f"--offset_increment={job_size}", f"--size={job_size}"] if rw == "read" else []
        reads = json.loads(_run([
            "fio", f"--name={kind}", f"--filename={file}", "--size=512m", "--direct=1",
            "--ioengine=psync", f"--rw={rw}", f"--bs={block}", f"--numjobs={jobs}", "--thread",
            "--group_reporting", "--time_based", "--runtime=2", "--output-format=json",
            *job_flags,
        ]))["jobs"][0]["read"]  # fmt: skip
        if kind == "single":
            return float(reads["clat_ns"]["percentile"]["50.000000"]) / 1e3
        return float(reads["iops"]) / 1e3 if kind == "many" else float(reads["bw_bytes"]) / 1e9


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pairs(
    kernels: Kernels, processor: Processor, tools: References, folder: Path
) -> Iterator[Pair]:
    """Return the figures that both sides can measure."""
    caches = [cache for cache in processor.caches if not cache.kind.endswith("i")]
    sizes = {cache.kind: cache.num_bytes for cache in caches}
    array_bytes, cores = memory_bytes(caches), processor.usable_cores
    for kind in ("L1d", "L2"):
        size = min(sizes.get(kind, 0) // 2, _FIRST_TLB)
        if size > 0:
            chase = partial(kernels.chase, size, 1_000_000, is_huge=False)
            yield Pair(
                f"{kind}, one load", "ns", partial(_min_ns, chase),
                partial(tools.latency_ns, size), "lmbench lat_mem_rd", False,
            )  # fmt: skip
    for operation in (Pass.COPY, Pass.TRIAD):
        name = operation.name.lower()
        yield Pair(
            f"memory, {name} by {cores} cores", "GB/s",
            partial(_max_gb, partial(kernels.stream, operation, array_bytes, cores, 14)),
            partial(tools.stream, name, array_bytes), "STREAM", True,
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


def _min_ns(measure: Callable[[], list[float]]) -> float:
    return min(measure()) * 1e9


def _max_gb(measure: Callable[[], list[float]]) -> float:
    return max(measure()) / 1e9


def _scaled(kernels: Kernels, folder: Path, key: str, factor: float) -> float:
    return _disk_medians(kernels, folder)[key] * factor


def _disk_medians(kernels: Kernels, folder: Path) -> dict[str, float]:
    """Return medians over rounds: fio reports a median of two seconds, not the best of many."""
    return {figure.key: figure.median or 0.0 for figure in storage_figures(kernels, folder)}


@contextmanager
def _disk_folder() -> Iterator[Path]:
    """Create a folder on the measured disk: in the working directory."""
    with tempfile.TemporaryDirectory(dir=Path(), prefix=".probe-") as folder:
        yield Path(folder).absolute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lmbench", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    machine_note = machine()
    with _disk_folder() as folder, compiled() as kernels:
        tools = References(folder, arguments.lmbench)
        measured = list(pairs(kernels, read_processor(MachineSource()), tools, folder))
        if arguments.only:
            measured = [
                pair for pair in measured if any(word in pair.name for word in arguments.only)
            ]
        for number in range(arguments.rounds):
            for pair in measured:
                print(f"round {number}: {pair.name}", file=sys.stderr)
                pair.measure()
    header = ("figure", "tool", "paceline probe", "the tool", "apart", f"within {WANTED:.0%}")
    rows = [pair.cells() for pair in measured]
    print("\n".join(" | ".join(row) for row in (header, *rows)))
    note = (
        f"{machine_note}. Best of {arguments.rounds} rounds in turns. Disk: O_DIRECT, the median "
        "of a round; one read: half take no longer; many: 32 threads; large: 1 MiB by 8 threads."
    )
    if arguments.write:
        write_table("probe", "The probe beside other tools", header, rows, note)


if __name__ == "__main__":
    main()
