"""The gain of queueing: n calls with a wait after each, and n queued calls with one wait.

A call takes t1 until the back end begins, t2 for the operation, and t3 until the front end knows.
With a wait after each, n calls take n (t1 + t2 + t3); queued, t1 + n t2 + t3 if t2 > t1 (Zhang
et al., "Dive into Deep Learning", 13.2). Both are predicted from single calls and then measured.

The n calls of both kinds are done in parts that take turns with the single calls, so that other
work on the machine affects prediction and measurement alike; each queued part has a t1 and a t3
of its own. This module must not know how operations are queued.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import ConfigError
from ..report.text import table, three_figures
from .clock import elapsed_s, synchronize
from .queues import Backend, QueueBackend, Spans, StreamBackend, Work
from .samples import (
    Measured,
    Timing,
    quartiles,
    take_turns,
)

_PARTS = 10
_SINGLE_CALLS = 40
"""Single calls timed before each part."""
_LEAST_S = 150e-6
"""Least time of the operation: much longer than queueing it."""
_CLOSE = 0.1
"""Largest relative error of a prediction on a quiet machine."""
_SPANS = (
    ("t1", "front end: until the back end begins"),
    ("t2", "back end: the operation"),
    ("t3", "return: until the front end knows"),
    ("busy", "back end, while others wait behind it"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchrony(Measured):
    """The times of one backend.

    Args:
        title: description of the back end.
        operation: description of a call.
        calls: n.
        parts: number of parts that the calls were split into.
        t1, t2, t3: front end, back end and return of single calls.
        busy: t2 while others wait behind it.
        blocking_s, queued_s: n calls, measured.
        blocking_predicted_s, queued_predicted_s: from t1, t2 and t3.
        depth: operations that can wait before the front end blocks.
    """

    title: str
    operation: str
    calls: int
    parts: int
    t1: Timing
    t2: Timing
    t3: Timing
    busy: Timing
    blocking_s: float
    queued_s: float
    blocking_predicted_s: float
    queued_predicted_s: float
    depth: int


def measure_asynchrony(device: torch.device, calls: int) -> Asynchrony:
    """Measure on a GPU's stream, or on a `QueueBackend` for a CPU.

    Raises:
        ConfigError: too few calls, or a device that is neither.
    """
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"bench async supports cpu and cuda, got {device.type}")
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # the back end is one thread: an operation on all cores would slow the front end
    try:
        backend = make_backend(device)
        try:
            return measure_backend(backend, calls)
        finally:
            backend.close()
    finally:
        torch.set_num_threads(threads)


def make_backend(device: torch.device) -> Backend:
    """Return the backend of a device, with a matrix product much longer than queueing it."""
    size, work = _product(device, 1024 if device.type == "cuda" else 64)
    operation = f"a product of two {size} x {size} matrices"
    if device.type == "cuda":
        return StreamBackend(work, f"{operation}, float32", device)
    return QueueBackend(work, f"{operation}, one thread")


def _product(device: torch.device, size: int) -> tuple[int, Work]:
    """Return a matrix size whose product takes at least `_LEAST_S`, and the product as work."""
    while True:
        x, out = torch.randn(size, size, device=device), torch.empty(size, size, device=device)

        def work(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            torch.mm(x, x, out=out)

        if min(elapsed_s(work) for _ in range(5)) >= _LEAST_S:
            return size, work
        size += max(16, size // 4)


def measure_backend(backend: Backend, calls: int) -> Asynchrony:
    """Measure t1, t2 and t3 of single calls, then ``calls`` of both kinds, in parts."""
    if calls < _PARTS:
        raise ConfigError(f"--calls must be >= {_PARTS}, got {calls}")
    sizes = [calls // _PARTS + (part < calls % _PARTS) for part in range(_PARTS)]
    spans: list[Spans] = []
    busy_s: list[float] = []
    blocking_s = queued_s = 0.0
    for _ in range(_SINGLE_CALLS):
        backend.once()
    for size in sizes:
        spans += [backend.once() for _ in range(_SINGLE_CALLS)]
        blocking_s += _calls_s(backend, size, is_waited_for=True)
        busy_s.append(backend.busy_s(_SINGLE_CALLS))
        queued_s += _calls_s(backend, size, is_waited_for=False)
    t1, t2, t3 = (
        Timing(name=f"t{number}", samples_s=samples)
        for number, samples in enumerate(zip(*spans, strict=True), start=1)
    )
    busy = Timing(name="t2, busy", samples_s=tuple(busy_s))
    return Asynchrony(
        title=backend.title,
        operation=backend.operation,
        calls=calls,
        parts=_PARTS,
        t1=t1,
        t2=t2,
        t3=t3,
        busy=busy,
        blocking_s=blocking_s,
        queued_s=queued_s,
        blocking_predicted_s=calls * (t1.mean_s + t2.mean_s + t3.mean_s),
        queued_predicted_s=_PARTS * (t1.mean_s + t3.mean_s) + calls * busy.mean_s,
        depth=backend.depth(),
    )


def _calls_s(backend: Backend, count: int, *, is_waited_for: bool) -> float:
    """Return the seconds of ``count`` calls, waiting after each or once at the end."""
    start_s = time.perf_counter()
    for _ in range(count):
        backend.issue()
        if is_waited_for:
            backend.finish()
    backend.finish()
    return time.perf_counter() - start_s


def numpy_and_torch(device: torch.device, num_rounds: int = 5) -> dict[str, Timing]:
    """Time ten random 1000 x 1000 matrices and their squares (the book's 13.2.1).

    Returns:
        The timings of "numpy", "torch" (until the work is queued) and "torch, synchronised".
    """
    rng = np.random.default_rng(0)

    def with_numpy() -> None:
        for _ in range(10):
            a = rng.normal(size=(1000, 1000))
            np.dot(a, a)

    def with_torch() -> None:
        for _ in range(10):
            a = torch.randn(size=(1000, 1000), device=device)
            torch.mm(a, a)

    def until_queued_s() -> float:
        synchronize()
        start_s = time.perf_counter()
        with_torch()
        return time.perf_counter() - start_s

    with_torch()
    return take_turns(
        {
            "numpy": lambda: elapsed_s(with_numpy),
            "torch": until_queued_s,
            "torch, synchronised": lambda: elapsed_s(with_torch),
        },
        num_rounds,
    )


def render_asynchrony(result: Asynchrony, toy: Mapping[str, Timing], device: str) -> list[str]:
    """Return the report: t1, t2, t3; n calls of both kinds and their prediction; the toy."""
    timings: list[tuple[str, str, Timing]] = [
        (name, text, getattr(result, name)) for name, text in _SPANS
    ]
    parts = [
        (
            name,
            three_figures(timing.mean_s),
            three_figures(timing.median_s),
            quartiles(timing),
            text,
        )
        for name, text, timing in timings
    ]
    queued = f"{result.parts} (t1 + t3) + n busy"
    calls = [
        _row("blocking", "n (t1 + t2 + t3)", result.blocking_s, result.blocking_predicted_s),
        _row("queued", queued, result.queued_s, result.queued_predicted_s),
    ]
    return [
        f"operation: {result.operation}",
        f"back end: {result.title}",
        "",
        *table(("", "mean", "median", "middle half", ""), parts),
        "",
        *table((f"{result.calls:,} calls", "measured", "predicted", "error", "by"), calls),
        f"predicted from the means above; queued calls run in {result.parts} parts, each with a t1 "
        "and a t3",
        *_warning(result),
        f"queueing saves {1 - result.queued_s / result.blocking_s:.0%}; "
        f"the queue holds {result.depth:,} operations before it blocks the front end",
        "",
        "ten random 1000 x 1000 matrices and their squares (Dive into Deep Learning, 13.2.1):",
        *table(
            ("", "median", "middle half"),
            [(name, three_figures(took.median_s), quartiles(took)) for name, took in toy.items()],
        ),
        *_cpu_note(device),
    ]


def _row(name: str, formula: str, measured_s: float, predicted_s: float) -> tuple[str, ...]:
    error = predicted_s / measured_s - 1
    return (name, three_figures(measured_s), three_figures(predicted_s), f"{error:+.1%}", formula)


def _warning(result: Asynchrony) -> list[str]:
    """Return a warning if a prediction is more than 10 % off."""
    errors = (
        result.blocking_predicted_s / result.blocking_s - 1,
        result.queued_predicted_s / result.queued_s - 1,
    )
    if max(abs(error) for error in errors) <= _CLOSE:
        return []
    return ["more than 10 % off: other work on this machine disturbed the measurement; repeat it"]


def _cpu_note(device: str) -> list[str]:
    if device != "cpu":
        return []
    return [
        "On a CPU torch returns after the work is done, so waiting changes nothing here; the queue",
        "above is Paceline's WorkQueue.",
    ]
