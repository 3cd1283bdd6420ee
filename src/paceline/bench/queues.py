"""Queues of operations: a stream on a GPU, and on a CPU a `WorkQueue` with one thread.

On a CPU PyTorch runs an operation before it returns, so a CPU has no queue to measure. `WorkQueue`
adds one: `put` returns when the operation is queued, `synchronize` when all are done. Torch's
operations release the GIL while they compute, so the front end continues meanwhile.

    front end   put put put put . . . . . . synchronize ------------------> continues
    back end        [  op  ][  op  ][  op  ][  op  ]                      /

A `Backend` is one of these queues with an operation. It times the three parts of one operation,
queues many, and measures how many the queue holds. This module must not know how times are used.

    front end   |t1|                    |t3|        t1: until the back end begins
    back end       |------- t2 --------|            t2: the operation
                                                    t3: until the front end knows
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Self

import torch

from ..errors import ConfigError

Work = Callable[[], object]


class WorkQueue:
    """A queue whose thread runs the operations in order.

    A full queue blocks ``put`` until it is half empty, not until one place is free: waking the
    thread costs as much as a short operation, so one wake-up serves many.

    Args:
        depth: most operations that wait, >= 2; the next `put` blocks. 1,024 is about what
            a CUDA stream holds (``paceline bench async`` measures it).

    Raises:
        ConfigError: ``depth`` is out of range.
    """

    def __init__(self, depth: int = 1024) -> None:
        if depth < 2:
            raise ConfigError(f"depth must be >= 2, got {depth}")
        self.depth = depth
        self._waiting: deque[Work] = deque()
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._is_idle = threading.Condition(self._lock)
        self._is_busy = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work_off, name="work-queue", daemon=True)
        self._thread.start()

    def put(self, work: Work, timeout_s: float | None = None) -> bool:
        """Queue an operation.

        Args:
            work: called without arguments; its result is ignored.
            timeout_s: how long to wait for room; None: without limit.

        Returns:
            Whether the operation was queued; False only after ``timeout_s``.

        Raises:
            ConfigError: the queue is closed, or is closed while this call waits for room.
        """
        with self._lock:
            if len(self._waiting) >= self.depth and not self._has_room.wait_for(
                lambda: self._is_closed or len(self._waiting) <= self.depth // 2, timeout_s
            ):
                return False
            if self._is_closed:  # perhaps while this call waited
                raise ConfigError("this WorkQueue is closed; create a new one")
            self._waiting.append(work)
            if not self._is_busy:
                self._is_busy = True
                self._has_work.notify()
        return True

    def synchronize(self) -> None:
        """Wait until every operation is done.

        Raises:
            BaseException: the first error that an operation has raised since the last call.
        """
        with self._lock:
            self._is_idle.wait_for(lambda: not self._waiting and not self._is_busy)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Finish the queued operations, then end the thread. May be called again.

        A `put` that is waiting for room raises ConfigError.
        """
        with self._lock:
            self._is_closed = True
            self._has_work.notify()
            self._has_room.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work_off(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_busy = False
                    self._is_idle.notify_all()
                    self._has_work.wait_for(lambda: self._waiting or self._is_closed)
                    if not self._waiting:
                        return
                    self._is_busy = True
                work = self._waiting.popleft()
                if len(self._waiting) == self.depth // 2:
                    self._has_room.notify_all()
            try:
                work()
            except BaseException as error:  # synchronize() raises it again
                self._error = self._error or error


class Spans(NamedTuple):
    """The three parts of one call on an empty queue, in seconds."""

    t1_s: float
    t2_s: float
    t3_s: float


class Backend(ABC):
    """A queue together with the operation that is measured on it.

    Args:
        title: description of the queue.
        operation: description of the operation.
        work: the operation.
    """

    def __init__(self, title: str, operation: str, work: Work) -> None:
        self.title = title
        self.operation = operation
        self._work = work

    @abstractmethod
    def issue(self) -> None:
        """Queue one operation."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all operations are done."""

    @abstractmethod
    def once(self) -> Spans:
        """Run one operation, wait for it, and return the times of its three parts."""

    @abstractmethod
    def busy_s(self, count: int) -> float:
        """Return the mean seconds of one of ``count`` operations queued one after another."""

    @abstractmethod
    def depth(self) -> int:
        """Return how many operations can wait before the front end blocks, found by trial."""

    def close(self) -> None:
        """Wait for all operations and release the queue."""
        self.finish()


class QueueBackend(Backend):
    """A `WorkQueue` of this ``depth`` and an operation."""

    def __init__(self, work: Work, operation: str, depth: int = 1024) -> None:
        title = f"a WorkQueue with one thread (torch has no queue on a CPU), depth {depth:,}"
        super().__init__(title, operation, work)
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
            self.issue()
        self._queue.put(lambda: stamps.append(time.perf_counter()))
        self.finish()
        return (stamps[1] - stamps[0]) / count

    def depth(self) -> int:
        gate, began = threading.Event(), threading.Event()

        def hold() -> None:
            began.set()
            gate.wait()

        self._queue.put(hold)
        began.wait()
        count = 0
        while self._queue.put(began.is_set, timeout_s=0.05):
            count += 1
        gate.set()
        self._queue.synchronize()
        return count

    def close(self) -> None:
        self._queue.close()


class StreamBackend(Backend):
    """The current stream of a GPU (CUDA or ROCm) and work that queues one operation on it."""

    def __init__(self, work: Work, operation: str, device: torch.device) -> None:
        title = f"the stream of {torch.cuda.get_device_name(device)}"
        super().__init__(title, operation, work)
        self._device = device

    def issue(self) -> None:
        self._work()

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def once(self) -> Spans:
        """Return t2 by the device's events, and t1 and t3 by the host's clock.

        t1 is the launch as the front end sees it; the delay until the device begins is in t3.
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
        _occupy_stream(10_000_000)  # a few ms, so that all are queued before the first begins
        before.record()
        for _ in range(count):
            self._work()
        after.record()
        self.finish()
        return float(before.elapsed_time(after)) / 1e3 / count

    def depth(self) -> int:
        self.finish()
        _occupy_stream(4_000_000_000)  # 2 to 3 s, in which nothing leaves the queue
        for count in range(100_000):
            start_s = time.perf_counter()
            self._work()
            if time.perf_counter() - start_s > 0.02:
                self.finish()
                return count
        self.finish()
        return 100_000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _occupy_stream(cycles: int) -> None:
    """Keep the current stream busy for ``cycles`` of the device's clock."""
    torch.cuda._sleep(cycles)
