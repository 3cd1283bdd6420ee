"""Operations that one thread carries out in order: what a stream is on an accelerator, on a CPU.

PyTorch runs an operation on a CPU before it returns, so a CPU alone has no queue to measure. This
is one, stated: `put` returns when the operation is queued, `synchronize` when all are done. Torch's
operations give up the interpreter's lock while they compute, so the front end goes on meanwhile.

    front end   put put put put . . . . . . synchronize ------------------> goes on
    back end        [  op  ][  op  ][  op  ][  op  ]                      /

A full queue blocks who puts until it is half empty, not until one place is free: waking up costs
as much as a short operation, and so it is paid once for many. This module must not know torch.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Self

from ..errors import ConfigError

Work = Callable[[], object]


class WorkQueue:
    """A queue with a thread of its own that works it off in order.

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
            ConfigError: the queue is closed.
        """
        with self._lock:
            if self._is_closed:
                raise ConfigError("this WorkQueue is closed; make another one")
            if len(self._waiting) >= self.depth and not self._has_room.wait_for(
                lambda: len(self._waiting) <= self.depth // 2, timeout_s
            ):
                return False
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
        """Let what is queued be done, then end the thread; more than once is fine."""
        with self._lock:
            self._is_closed = True
            self._has_work.notify()
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
            except BaseException as error:
                self._error = self._error or error
