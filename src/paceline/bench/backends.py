"""What carries queued operations out: a stream on a GPU, or on a CPU a queue with one thread.

    front end   |t1|                    |t3|        t1: until the back end begins
    back end       |------- t2 --------|            t2: the operation
                                                        t3: until the front end knows

A backend can do one operation and tell the three apart, queue many, and say how many it holds. On
a CPU torch itself queues nothing, so the queue is ours and is said to be. It must not know what is
made of the figures.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from .workqueue import WorkQueue


class Spans(NamedTuple):
    """One call from an empty queue, in seconds."""

    t1_s: float
    t2_s: float
    t3_s: float


class Backend(ABC):
    """Where operations are queued."""

    title: str
    operation: str

    @abstractmethod
    def issue(self) -> None:
        """Queue one operation, from the front end."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all are done and the front end knows."""

    @abstractmethod
    def once(self) -> Spans:
        """One operation and a wait, taken apart."""

    @abstractmethod
    def busy_s(self, count: int) -> float:
        """What one operation takes while others wait behind it: the mean of ``count``, in s."""

    @abstractmethod
    def depth(self) -> int:
        """How many operations wait before the front end is blocked, found by trying."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""


class QueueBackend(Backend):
    """A `WorkQueue` and an operation.

    Args:
        work: the operation; torch's give up the interpreter's lock while they compute.
        operation: what it is, in words.
        depth: of the queue.
    """

    def __init__(self, work: Callable[[], object], operation: str, depth: int = 1024) -> None:
        self.title = f"a queue with one thread (ours: torch on a CPU has none), depth {depth:,}"
        self.operation = operation
        self._work = work
        self._queue = WorkQueue(depth)

    def issue(self) -> None:
        self._queue.put(self._work)

    def finish(self) -> None:
        self._queue.synchronize()

    def once(self) -> Spans:
        stamps: list[float] = []

        def stamped() -> None:
            stamps.append(time.perf_counter())
            self._work()
            stamps.append(time.perf_counter())

        start_s = time.perf_counter()
        self._queue.put(stamped)
        self._queue.synchronize()
        stop_s = time.perf_counter()
        began_s, ended_s = stamps
        return Spans(began_s - start_s, ended_s - began_s, stop_s - ended_s)

    def busy_s(self, count: int) -> float:
        stamps: list[float] = []
        self._queue.put(lambda: stamps.append(time.perf_counter()))
        for _ in range(count):
            self._queue.put(self._work)
        self._queue.put(lambda: stamps.append(time.perf_counter()))
        self._queue.synchronize()
        return (stamps[1] - stamps[0]) / count

    def depth(self) -> int:
        gate, began = threading.Event(), threading.Event()

        def hold() -> None:
            began.set()
            gate.wait()

        self._queue.put(hold)
        began.wait()
        count = 0
        while self._queue.put(_nothing, timeout_s=0.05):
            count += 1
        gate.set()
        self._queue.synchronize()
        return count

    def close(self) -> None:
        self._queue.close()


class StreamBackend(Backend):
    """The current stream of a GPU.

    Args:
        work: queues one operation on the device.
        operation: what it is, in words.
        device: a CUDA (or ROCm) device.
    """

    def __init__(self, work: Callable[[], object], operation: str, device: torch.device) -> None:
        self.title = f"the stream of {torch.cuda.get_device_name(device)}"
        self.operation = operation
        self._work = work
        self._device = device

    def issue(self) -> None:
        self._work()

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def once(self) -> Spans:
        """The device's part is told by its own events; what is left is the way there and back.

        t1 is the launch as the front end sees it; that the device begins later is part of t3.
        """
        before, after = _event(), _event()
        self.finish()
        before.record()
        start_s = time.perf_counter()
        self._work()
        issued_s = time.perf_counter()
        after.record()
        self.finish()
        stop_s = time.perf_counter()
        t2_s = float(before.elapsed_time(after)) / 1e3
        return Spans(issued_s - start_s, t2_s, max(0.0, stop_s - issued_s - t2_s))

    def busy_s(self, count: int) -> float:
        before, after = _event(), _event()
        _hold(10_000_000)  # a few ms, so that all are queued before the first begins
        before.record()
        for _ in range(count):
            self._work()
        after.record()
        self.finish()
        return float(before.elapsed_time(after)) / 1e3 / count

    def depth(self) -> int:
        self.finish()
        _hold(4_000_000_000)  # 2 to 3 s, in which nothing leaves the queue
        for count in range(100_000):
            start_s = time.perf_counter()
            self._work()
            if time.perf_counter() - start_s > 0.02:
                self.finish()
                return count
        self.finish()
        return 100_000

    def close(self) -> None:
        self.finish()


def make_backend(device: torch.device) -> Backend:
    """The backend of a device, with a product of matrices that takes well longer than to queue."""
    if device.type == "cuda":
        return _on_stream(device)
    size, work = _product(torch.device("cpu"), 64, least_s=150e-6)
    return QueueBackend(work, f"a product of two {size} x {size} matrices, one thread")


def _on_stream(device: torch.device) -> Backend:
    size, work = _product(device, 1024, least_s=150e-6)
    return StreamBackend(work, f"a product of two {size} x {size} matrices, float32", device)


def _product(device: torch.device, size: int, least_s: float) -> tuple[int, Callable[[], object]]:
    """A product that takes at least so long, its matrices' size found by trying."""
    while True:
        x, out = torch.randn(size, size, device=device), torch.empty(size, size, device=device)

        def work(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            torch.mm(x, x, out=out)

        times = []
        for _ in range(5):
            start_s = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start_s)
        if min(times) >= least_s:
            return size, work
        size += max(16, size // 4)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _hold(cycles: int) -> None:
    """Keep the current stream busy for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _nothing() -> None:
    pass
