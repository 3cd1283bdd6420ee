"""``paceline.Benchmark``: how long a block or function takes, including the work that it queued.

    with paceline.Benchmark("without torchscript"):        # without torchscript: 0.1234 sec
        for _ in range(1000):
            net(x)

It prints what the `Benchmark` of Zhang, Lipton, Li, Smola, "Dive into Deep Learning", 13.1, prints.
But an operation on an accelerator returns when it is queued, so this one waits for the accelerators
in use before it starts the clock and before it stops it. This module must not import torch: without
torch nothing is queued, and a device that is not in use must not be initialised.
"""

import contextvars
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from ..errors import ConfigError
from .samples import (
    Timing,
)

P = ParamSpec("P")
R = TypeVar("R")

_depth: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)
"""How many benchmarks of this thread are running; inner ones are indented."""


class Queue(Protocol):
    """A ``torch.cuda.Stream``, a `WorkQueue`, a device module: anything to wait for."""

    def synchronize(self) -> object:
        """Return when all queued work is done."""


def synchronize(queues: Iterable[Queue] = ()) -> None:
    """Wait for ``queues`` and for each accelerator that this process has used."""
    for queue in queues:
        queue.synchronize()
    for module, index in _in_use():
        module.synchronize(*index)


def _in_use() -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield torch's module and the device number of each accelerator that is in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            # Asking a device to synchronise would make a context where it has none.
            has_context = getattr(torch._C, f"_{kind}_hasPrimaryContext", lambda index: True)
            yield from ((module, (i,)) for i in range(module.device_count()) if has_context(i))
    if torch.backends.mps.is_available():
        yield torch.mps, ()


def elapsed_s(work: Callable[[], object], count: int = 1) -> float:
    """Return the seconds of ``count`` calls, from an empty queue until it is empty again."""
    synchronize()
    start_s = time.perf_counter()
    for _ in range(count):
        work()
    synchronize()
    return time.perf_counter() - start_s


class Benchmark:
    """Measures a block, or every call of a function, and prints the time.

    As a context manager, each entry gives one time. As a decorator, and in `measure`, each call
    runs the function ``repeat`` times; before the first call it runs ``warmup`` times more.

    Args:
        name: printed before the time.
        warmup: number of first entries that do not count, >= 0.
        repeat: timed runs of the function in one call, >= 1.
        waits_for: queues besides the accelerators in use: streams, `WorkQueue` objects, anything
            with ``synchronize()``.
        quiet: print nothing.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> bench = Benchmark("sum", warmup=1, repeat=5, quiet=True)
        >>> timing = bench.measure(sum, range(1000))
        >>> len(timing.samples_s), timing.least_s <= timing.median_s <= timing.most_s
        (5, True)
    """

    def __init__(
        self,
        name: str = "Done",
        *,
        warmup: int = 0,
        repeat: int = 1,
        waits_for: Sequence[Queue] = (),
        quiet: bool = False,
    ) -> None:
        if warmup < 0:
            raise ConfigError(f"warmup must be >= 0, got {warmup}")
        if repeat < 1:
            raise ConfigError(f"repeat must be >= 1, got {repeat}")
        self.name = name
        self.warmup = warmup
        self.repeat = repeat
        self.quiet = quiet
        self._queues = tuple(waits_for)
        self._starts: list[float] = []
        self._samples: list[float] = []
        self._num_warmed = 0

    @property
    def seconds(self) -> float:
        """The last counted time.

        Raises:
            ConfigError: nothing has been measured yet.
        """
        return self.timing.samples_s[-1]

    @property
    def timing(self) -> Timing:
        """All counted times.

        Raises:
            ConfigError: nothing has been measured yet.
        """
        return Timing(name=self.name, samples_s=tuple(self._samples))

    def measure(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Timing:
        """Run a function ``repeat`` times after the warm-up, and return these times."""
        _, timing = self._repeated(functools.partial(function, *args, **kwargs))
        return timing

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function, measured at each call; it returns the value of its last run."""

        @functools.wraps(function)
        def measured(*args: P.args, **kwargs: P.kwargs) -> R:
            value, _ = self._repeated(functools.partial(function, *args, **kwargs))
            return value

        return measured

    def __enter__(self) -> Self:
        _depth.set(_depth.get() + 1)
        synchronize(self._queues)
        self._starts.append(time.perf_counter())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                synchronize(self._queues)
            stop_s = time.perf_counter()
        finally:
            start_s = self._starts.pop()
            _depth.set(_depth.get() - 1)
        if kind is None:  # a block that raised was not measured
            self._take(stop_s - start_s)

    def _take(self, seconds: float) -> None:
        if self._num_warmed < self.warmup:
            self._num_warmed += 1
            note = f" (warm-up {self._num_warmed} of {self.warmup}, not counted)"
        else:
            self._samples.append(seconds)
            note = ""
        self._print(f"{seconds:.4f} sec{note}")

    def _repeated(self, function: Callable[[], R]) -> tuple[R, Timing]:
        samples: list[float] = []
        with self._silence():
            while len(samples) < self.repeat:
                is_counted = self._num_warmed == self.warmup
                with self:
                    value = function()
                if is_counted:  # the function may itself have added samples before it
                    samples.append(self._samples[-1])
        timing = Timing(name=self.name, samples_s=tuple(samples))
        spread = (
            f" (median of {self.repeat}, {timing.least_s:.4f} to {timing.most_s:.4f})"
            if self.repeat > 1
            else ""
        )
        self._print(f"{timing.median_s:.4f} sec{spread}")
        return value, timing

    @contextmanager
    def _silence(self) -> Iterator[None]:
        """Print nothing for each repeat; the summary is printed afterwards."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def _print(self, text: str) -> None:
        if not self.quiet:
            print(f"{'  ' * _depth.get()}{self.name}: {text}", flush=True)
