"""Two pieces of work at once: computing and copying, and independent work at two places.

Each piece is timed alone, then both together (`samples.TimedTogether`). The work is matrix
products, as in Zhang et al., "Dive into Deep Learning", 13.3.

Overlap (13.3.2): each result is copied to host memory; result i-1 can be copied while result i is
computed. On a GPU the copy engine copies to pageable or pinned memory, on the stream of the
computation or on its own. A CPU has neither copy engine nor pinned memory: a second thread copies,
which needs a core and shares the memory bandwidth.

Parallel (13.3.1), a list of products at each place:

    two GPUs     one each, without waiting in between
    one GPU      two of its streams
    a CPU        two processes, each with half of the threads

This module must not know how the result is printed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from .apart import Apart
from .clock import elapsed_s
from .queues import WorkQueue
from .samples import (
    Measured,
    TimedTogether,
    measure_together,
)

ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap(Measured):
    """All ways to copy during the same computation.

    Args:
        work: description of the computation and the copies.
        ways: computing is ``one``, copying ``other``.
        notes: about this kind of device.
    """

    work: str
    ways: tuple[TimedTogether, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel(Measured):
    """Work at two places.

    Args:
        places: description of the two places.
        work: description of the work at each.
        result: times alone and together.
    """

    places: str
    work: str
    result: TimedTogether

    def to_json(self) -> dict[str, object]:
        """Return the result as one JSON object."""
        return {"places": self.places, "work": self.work, **self.result.to_json()}


# -- computing and copying ------------------------------------------------------------------------


def measure_overlap(device: torch.device, size: int, count: int) -> Overlap:
    """Time ``count`` products of size x size matrices and as many copies, alone and together.

    Raises:
        ConfigError: a number is out of range, or the device is neither a CPU nor a GPU.
    """
    if size < 1 or count < 2:
        raise ConfigError(f"--size must be >= 1 and --count >= 2, got {size} and {count}")
    mib = size * size * 4 / 2**20
    work = f"{count} products of {size} x {size} matrices, each result copied ({mib:.3g} MiB)"
    if device.type == "cuda":
        return _on_gpu(device, size, count, work)
    if device.type == "cpu":
        return _on_cpu(size, count, work)
    raise ConfigError(f"bench overlap supports cpu and cuda, got {device.type}")


def _on_cpu(size: int, count: int, work: str) -> Overlap:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one core computes, another copies
    try:
        ways = _cpu_ways(size, count)
    finally:
        torch.set_num_threads(threads)
    notes = (
        "a CPU has no copy engine and no pinned memory: a second thread copies within memory;",
        f"computing uses 1 thread, copying 1, of {threads}",
    )
    return Overlap(work=work, ways=ways, notes=notes)


def _cpu_ways(size: int, count: int) -> tuple[TimedTogether, ...]:
    """Time products and copies in one thread, then with the copies in a second thread."""
    x = torch.rand(size, size)
    results, copies = _buffers(size, count), _buffers(size, count)

    def compute(i: int) -> None:
        torch.mm(x, x, out=results[i])

    def copy(i: int) -> None:
        copies[i].copy_(results[i])

    with WorkQueue() as queue:

        def in_turn(i: int) -> None:
            compute(i)
            copy(i)

        def queued(i: int) -> None:
            compute(i)
            queue.put(lambda: copy(i))

        alone = (_each(compute, count), _each(copy, count))
        return (
            measure_together("blocking", *alone, _each(in_turn, count), ROUNDS),
            measure_together(
                "by a second thread", *alone, _each(queued, count, queue.synchronize), ROUNDS
            ),
        )


def _on_gpu(device: torch.device, size: int, count: int, work: str) -> Overlap:
    x = torch.rand(size, size, device=device)
    results = [torch.empty(size, size, device=device) for _ in range(count)]
    pageable = _buffers(size, count)
    pinned = [torch.empty(size, size, pin_memory=True) for _ in range(count)]
    side = _stream(device)

    def compute(i: int) -> None:
        torch.mm(x, x, out=results[i])

    def way(name: str, to: Sequence[Tensor], non_blocking: bool, own_stream: bool) -> TimedTogether:
        def copy(i: int) -> None:
            to[i].copy_(results[i], non_blocking=non_blocking)

        def both(i: int) -> None:
            compute(i)
            if not own_stream:
                copy(i)
                return
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                copy(i)

        alone = (_each(compute, count), _each(copy, count))
        return measure_together(name, *alone, _each(both, count), ROUNDS)

    ways = (
        way("blocking, pageable", pageable, False, False),
        way("non-blocking, pageable", pageable, True, False),
        way("non-blocking, pinned", pinned, True, False),
        way("pinned, a stream of its own", pinned, True, True),
    )
    notes = (
        "on one stream a copy waits for the work queued before it and delays the work after it",
    )
    return Overlap(work=work, ways=ways, notes=notes)


def _buffers(size: int, count: int) -> list[Tensor]:
    """Return matrices in memory already written to, so that no page fault is measured."""
    return [torch.zeros(size, size) for _ in range(count)]


def _each(
    work: Callable[[int], object], count: int, wait: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    """Return a function that does ``count`` pieces of work, waits, and returns the seconds."""

    def whole() -> None:
        for i in range(count):
            work(i)
        wait()

    return lambda: elapsed_s(whole)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# -- two places -----------------------------------------------------------------------------------


class Products:
    """Matrix products, in a process of their own that `Apart` starts."""

    def __init__(self, size: int, count: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._x = torch.rand(size, size)
        self._out = torch.empty(size, size)
        self._count = count

    def work(self) -> Mapping[str, object]:
        """Compute all products."""
        for _ in range(self._count):
            torch.mm(self._x, self._x, out=self._out)
        return {}


def measure_parallel(device: torch.device, size: int, count: int) -> Parallel:
    """Time ``count`` products of size x size matrices at each of two places, alone and together.

    Raises:
        ConfigError: a number is out of range, or the device is neither a CPU nor a GPU.
    """
    if size < 1 or count < 1:
        raise ConfigError(f"--size and --count must be >= 1, got {size} and {count}")
    if device.type == "cpu":
        places, result = _processes(size, count)
    elif device.type == "cuda":
        is_one = torch.cuda.device_count() == 1
        devices = (device, device) if is_one else tuple(torch.device("cuda", i) for i in range(2))
        places = f"two streams of {device}" if is_one else "cuda:0 and cuda:1"
        result = _on_gpus("two streams" if is_one else "two devices", devices, size, count)
    else:
        raise ConfigError(f"bench parallel supports cpu and cuda, got {device.type}")
    work = f"{count} products of {size} x {size} matrices at each"
    return Parallel(places=places, work=work, result=result)


def _processes(size: int, count: int) -> tuple[str, TimedTogether]:
    threads = max(1, torch.get_num_threads() // 2)
    arguments = {"size": size, "count": count, "threads": threads}
    target = f"{__name__}:Products"
    with Apart(target, arguments) as first, Apart(target, arguments) as second:

        def timed(*seats: Apart) -> Callable[[], float]:
            def work() -> None:
                for seat in seats:
                    seat.begin("work")
                for seat in seats:
                    seat.end()

            return lambda: elapsed_s(work)

        result = measure_together(
            "two processes", timed(first), timed(second), timed(first, second), ROUNDS
        )
    return f"two processes on the CPU, {threads} thread{'s' * (threads != 1)} each", result


def _on_gpus(name: str, devices: Sequence[torch.device], size: int, count: int) -> TimedTogether:
    streams = [_stream(device) for device in devices]
    inputs = [torch.rand(size, size, device=device) for device in devices]

    def timed(*places: int) -> Callable[[], float]:
        def work() -> None:
            for place in places:
                with torch.cuda.stream(streams[place]):
                    for _ in range(count):
                        torch.mm(inputs[place], inputs[place])

        return lambda: elapsed_s(work)

    return measure_together(name, timed(0), timed(1), timed(0, 1), ROUNDS)
