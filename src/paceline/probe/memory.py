"""Caches and memory: the latency of one load, of several at once, and the bandwidth of many.

    part of L1, of L2, of L3         each load depends on the one before: a ring in random order
    memory, single                   the same over four times the last cache, in huge pages
    memory, with small pages         the same; most loads also walk the page table
    memory, several banks            sixteen rings at once, whose loads are independent
    memory, burst                    word after word, with the prefetcher's help
    read, copy, triad                by all cores, over four times all their last caches together;
                                     bytes read and written count, as in STREAM

Source: J. D. McCalpin, "Memory Bandwidth and Machine Balance in Current High Performance
Computers", IEEE TCCA Newsletter, 1995 (STREAM); L. McVoy, C. Staelin, "lmbench: Portable Tools for
Performance Analysis", USENIX 1996 (lat_mem_rd).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import psutil

from ..bench.samples import Measured
from ..machine.processor import Cache
from ..plan import format_bytes
from ..system.limits import available_bytes
from .figures import Figure, Group, Unit
from .kernels import Kernels, Pass

_MIB = 1 << 20
_STEPS = {"L1d": 2_000_000, "L2": 1_000_000, "L3": 400_000}
_PARTS = {"L1d": 2, "L2": 2, "L3": 4}
"""One part in this many of a cache is filled; the last is shared with other programs."""
_MEMORY_STEPS = 150_000
_REPEATS = 7
_SHARE = 8
"""One part in this many of the free memory is used at once."""
_LEAST_CURVE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOfSize(Measured):
    """Latency of one load in a ring of this many bytes."""

    num_bytes: int
    latency_s: float


def memory_figures(kernels: Kernels, caches: Sequence[Cache], cores: int) -> Iterator[Figure]:
    """Yield latencies, then bandwidths. MemoryError: there is too little memory."""
    sizes = {cache.kind: cache.num_bytes for cache in caches}
    for kind, key in (("L1d", "l1"), ("L2", "l2"), ("L3", "l3")):
        size, samples, how = sizes.get(kind, 0) // _PARTS[kind], list[float](), ""
        if size:
            samples = kernels.chase(size, _STEPS[kind], repeats=_REPEATS)
            how = f"at random in {format_bytes(size)}"
        yield Figure(
            key=f"{key}_latency_s", what=f"{kind.rstrip('d')}, one load", group=Group.MEMORY,
            unit=Unit.SECONDS, samples=tuple(samples), how=how,
            why_not="" if samples else "this machine has none, or does not report its size",
        )  # fmt: skip
    most = memory_bytes(caches)
    yield from _single_loads(kernels, most)
    yield from _by_one_core(kernels, most)
    yield from _by_all_cores(kernels, memory_bytes(together(caches)), cores)


def _single_loads(kernels: Kernels, size: int) -> Iterator[Figure]:
    for key, what, rings, is_huge, how in (
        ("memory_latency_s", "memory, one load", 1, True, "huge pages"),
        ("memory_walk_latency_s", "memory, one load and the page table", 1, False, "small pages"),
        ("memory_banks_latency_s", "memory, 16 loads at once, each", 16, True, "huge pages"),
    ):
        took_s = kernels.chase(size, _MEMORY_STEPS, rings=rings, is_huge=is_huge, repeats=_REPEATS)
        yield Figure(
            key=key, what=what, group=Group.MEMORY, unit=Unit.SECONDS, samples=tuple(took_s),
            how=f"at random in {format_bytes(size)}, {how}",
        )  # fmt: skip


def _by_one_core(kernels: Kernels, size: int) -> Iterator[Figure]:
    rates = kernels.stream(Pass.READ, size, 1, _REPEATS)
    yield Figure(
        key="memory_burst_latency_s", what="memory, word after word, each", group=Group.MEMORY,
        unit=Unit.SECONDS, samples=tuple(8 / rate for rate in rates), how="8 bytes, one core",
    )  # fmt: skip
    yield Figure(
        key="memory_core_bytes_per_s", what="memory, copied by one core", group=Group.MEMORY,
        unit=Unit.BYTES, samples=tuple(kernels.stream(Pass.COPY, size, 1, _REPEATS)),
        how="bytes read and written, as STREAM counts",
    )  # fmt: skip


def _by_all_cores(kernels: Kernels, size: int, cores: int) -> Iterator[Figure]:
    for what in Pass:
        name = what.name.lower()
        yield Figure(
            key=f"memory_{name}_bytes_per_s", what=f"memory, {name} by all cores",
            group=Group.MEMORY, unit=Unit.BYTES,
            samples=tuple(kernels.stream(what, size, cores, 2 * _REPEATS)),
            how=f"{cores} threads, arrays of {format_bytes(size)}",
        )  # fmt: skip


def latency_curve(kernels: Kernels, caches: Sequence[Cache]) -> tuple[LatencyOfSize, ...]:
    """Return the latency of one load in rings that double in size, up to beyond every cache."""
    curve, size, most = [], _LEAST_CURVE_BYTES, memory_bytes(caches)
    while size <= most:
        steps = 100_000 if size <= 4 * _MIB else 50_000
        took_s = min(kernels.chase(size, steps, repeats=3))
        curve.append(LatencyOfSize(num_bytes=size, latency_s=took_s))
        size *= 2
    return tuple(curve)


def together(caches: Sequence[Cache]) -> tuple[Cache, ...]:
    """Merge all caches of a kind: data that the cores share out lies in all of them."""
    return tuple(
        replace(cache, num_bytes=cache.num_bytes * cache.count, count=1) for cache in caches
    )


def memory_bytes(caches: Sequence[Cache]) -> int:
    """Return a size that no cache holds, a power of two: 4 x the last one if memory allows."""
    last = max((cache.num_bytes for cache in caches), default=0)
    free = min(psutil.virtual_memory().available, available_bytes()) // _SHARE
    wanted = 1 << (max(4 * last, 64 * _MIB) - 1).bit_length()
    return min(wanted, 1 << (max(free, _MIB).bit_length() - 1))
