"""Computing and copying at once: alone, one after the other, and overlapped.

The chapter's work (Zhang et al., "Dive into Deep Learning", 13.3.2): products of matrices, and each
result copied to the host's memory; result i-1 can be copied while result i is computed.

On a GPU the copy goes by the copy engine, from pageable memory or pinned, on the stream of the
computation or on its own. On a CPU there is neither engine nor pinned memory: a second thread
copies, and it needs a core and the same memory as the first. This module must not know how it is
printed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from .together import TimedTogether, measure_together
from .workqueue import WorkQueue

ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """All ways of copying beside the same computation.

    Args:
        work: what is computed and copied, in words.
        rows: computing is ``one``, copying ``other``.
        notes: what a reader must know of this machine.
    """

    work: str
    rows: tuple[TimedTogether, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """As one JSON object."""
        rows = [row.to_json() for row in self.rows]
        return {"work": self.work, "ways": rows, "notes": list(self.notes)}


def measure_overlap(device: torch.device, size: int, count: int) -> Overlap:
    """``count`` products of size x size, and as many copies.

    Raises:
        ConfigError: a number is out of range, or the device is neither a CPU nor a GPU.
    """
    if size < 1 or count < 2:
        raise ConfigError(f"--size must be >= 1 and --count >= 2, got {size} and {count}")
    if device.type == "cuda":
        return _on_gpu(device, size, count)
    if device.type == "cpu":
        return _on_cpu(size, count)
    raise ConfigError(f"bench overlap knows cpu and cuda, got {device.type}")


def _on_cpu(size: int, count: int) -> Overlap:
    x = torch.rand(size, size)
    results, copies = _buffers(size, count), _buffers(size, count)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a core for the computation; the other is for who copies

    def compute(i: int) -> None:
        torch.mm(x, x, out=results[i])

    def copy(i: int) -> None:
        copies[i].copy_(results[i])

    with WorkQueue() as queue:

        def in_turn() -> None:
            for i in range(count):
                compute(i)
                copy(i)

        def overlapped() -> None:
            for i in range(count):
                compute(i)
                queue.put(lambda i=i: copy(i))  # type: ignore[misc]
            queue.synchronize()

        alone = (_timed(lambda: _each(compute, count)), _timed(lambda: _each(copy, count)))
        rows = (
            measure_together("blocking", *alone, _timed(in_turn), ROUNDS),
            measure_together("by a second thread", *alone, _timed(overlapped), ROUNDS),
        )
    torch.set_num_threads(threads)
    return Overlap(
        work=_work(size, count),
        rows=rows,
        notes=(
            "a CPU has no copy engine and nothing to pin: a second thread copies within memory;",
            f"computing uses 1 thread, copying 1, of {threads}",
        ),
    )


def _on_gpu(device: torch.device, size: int, count: int) -> Overlap:
    x = torch.rand(size, size, device=device)
    results = [torch.empty(size, size, device=device) for _ in range(count)]
    pageable = _buffers(size, count)
    pinned = [torch.empty(size, size, pin_memory=True) for _ in range(count)]
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def compute(i: int) -> None:
        torch.mm(x, x, out=results[i])

    def timed(work: Callable[[], object]) -> Callable[[], float]:
        return _timed(work, lambda: torch.cuda.synchronize(device))

    def row(name: str, to: Sequence[Tensor], non_blocking: bool, own_stream: bool) -> TimedTogether:
        def copy(i: int) -> None:
            to[i].copy_(results[i], non_blocking=non_blocking)

        def both() -> None:
            for i in range(count):
                compute(i)
                if not own_stream:
                    copy(i)
                    continue
                side.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(side):
                    copy(i)

        return measure_together(
            name,
            timed(lambda: _each(compute, count)),
            timed(lambda: _each(copy, count)),
            timed(both),
            ROUNDS,
        )

    return Overlap(
        work=_work(size, count),
        rows=(
            row("blocking, pageable", pageable, False, False),
            row("non-blocking, pageable", pageable, True, False),
            row("non-blocking, pinned", pinned, True, False),
            row("pinned, a stream of its own", pinned, True, True),
        ),
        notes=("on one stream a copy waits for what was queued before it, and holds up the rest",),
    )


def _buffers(size: int, count: int) -> list[Tensor]:
    """Memory that was touched: the first write to a page is not what is measured."""
    return [torch.zeros(size, size) for _ in range(count)]


def _each(work: Callable[[int], object], count: int) -> None:
    for i in range(count):
        work(i)


def _timed(
    work: Callable[[], object], wait: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    def measure() -> float:
        wait()
        start_s = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - start_s

    return measure


def _work(size: int, count: int) -> str:
    mib = size * size * 4 / 2**20
    return f"{count} products of {size} x {size} matrices, each result copied ({mib:.3g} MiB)"
