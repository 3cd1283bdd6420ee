"""Queues of operations: a stream on a GPU, or on a CPU a queue with one thread, which is ours.

PyTorch runs an operation on a CPU before it returns, so a CPU alone has no queue to measure.
`WorkQueue` is one, stated: `put` returns when the operation is queued, `synchronize` when all are
done. Torch's operations give up the interpreter's lock while they compute, so the front end goes
on meanwhile.

    front end   put put put put . . . . . . synchronize ------------------> goes on
    back end        [  op  ][  op  ][  op  ][  op  ]                      /

A backend is either queue with an operation: it can do one and tell its three parts apart, queue
many, and say how many it holds. This module must not know what is made of the figures.

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
    """A queue with a thread of its own that works it off in order.

    A full queue blocks ``put`` until it is half empty, not until one place is free: waking up
    costs as much as a short operation, and so it is paid once for many.

    Args:
        depth: how many operations wait at most, >= 2; the next `put` blocks. 1,024 is about what
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
            work: is called without arguments; what it returns is dropped.
            timeout_s: how long to wait for room; None for ever.

        Returns:
            Whether it was queued; False only after ``timeout_s``.

        Raises:
            ConfigError: the queue is closed, or is closed while this call waits for room.
        """
        with self._lock:
            self._check_open()
            if len(self._waiting) >= self.depth:
                if not self._has_room.wait_for(self._may_put, timeout_s):
                    return False
                self._check_open()  # close() does not wait for this call
            self._waiting.append(work)
            if not self._is_busy:
                self._is_busy = True
                self._has_work.notify()
        return True

    def synchronize(self) -> None:
        """Wait until every operation is done.

        Raises:
            Whatever the first operation raised that failed since the last call.
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

    def _may_put(self) -> bool:
        """Return whether a `put` that waits for room has nothing left to wait for."""
        return self._is_closed or len(self._waiting) <= self.depth // 2

    def _check_open(self) -> None:
        """Raise ConfigError if the queue is closed."""
        if self._is_closed:
            raise ConfigError("this WorkQueue is closed; create a new one")

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
            except BaseException as error:  # raised again where the queue is waited for
                self._error = self._error or error


class Spans(NamedTuple):
    """One call from an empty queue, in seconds."""

    t1_s: float
    t2_s: float
    t3_s: float


class Backend(ABC):
    """Where operations are queued.

    Args:
        title: where that is, in words.
        operation: what each does, in words.
        work: the operation.
    """

    def __init__(self, title: str, operation: str, work: Work) -> None:
        self.title = title
        self.operation = operation
        self._work = work

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

    def close(self) -> None:
        """Finish, and give back what is held."""
        self.finish()


class QueueBackend(Backend):
    """A `WorkQueue`, of this ``depth``, and an operation."""

    def __init__(self, work: Work, operation: str, depth: int = 1024) -> None:
        title = f"a queue with one thread (ours: torch on a CPU has none), depth {depth:,}"
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
    """The current stream of a GPU (CUDA or ROCm), and work that queues one operation on it."""

    def __init__(self, work: Work, operation: str, device: torch.device) -> None:
        title = f"the stream of {torch.cuda.get_device_name(device)}"
        super().__init__(title, operation, work)
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


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _hold(cycles: int) -> None:
    """Keep the current stream busy for ``cycles`` of the device's clock."""
    torch.cuda._sleep(cycles)
