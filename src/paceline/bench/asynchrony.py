"""What queueing saves: n calls that are waited for one by one, and n calls that are queued.

A call costs the front end t1 to order, the back end t2 to do, and t3 until its result is known.
Waited for one by one, n calls cost n (t1 + t2 + t3); queued, t1 + n t2 + t3, where t2 > t1 (Zhang
et al., "Dive into Deep Learning", 13.2). Both are predicted from single calls and then measured.

The n calls of both kinds are done in parts that take turns with the single calls, so that what
else the machine does meets prediction and measurement alike; queued, each part has a t1 and a t3
of its own. This module must not know how it is printed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import ConfigError
from .backends import Backend, Spans, make_backend
from .samples import Timing, take_turns
from .waiting import synchronize

_PARTS = 10
_SINGLE_CALLS = 40
"""Taken apart before each part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchrony:
    """What was found on one backend.

    Args:
        title: the back end, in words.
        operation: what a call does.
        calls: n.
        parts: in how many parts they were done.
        t1: front end, t2: back end, t3: return; of single calls.
        busy: t2 while others wait behind it.
        blocking_s, queued_s: n calls, measured.
        blocking_predicted_s, queued_predicted_s: from t1, t2 and t3.
        depth: operations that wait before the front end is blocked.
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

    def to_json(self) -> dict[str, object]:
        """As one JSON object."""
        return {
            name: value.to_json() if isinstance(value, Timing) else value
            for name in Asynchrony.__dataclass_fields__
            for value in (getattr(self, name),)
        }


def measure_asynchrony(device: torch.device, calls: int) -> Asynchrony:
    """On the device's own backend, or on a stated queue where it is a CPU.

    Raises:
        ConfigError: too few calls, or a device that has neither.
    """
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"bench async knows cpu and cuda, got {device.type}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one back end: an operation that uses all cores would meet itself
    backend = make_backend(device)
    try:
        return measure_backend(backend, calls)
    finally:
        backend.close()
        torch.set_num_threads(threads)


def measure_backend(backend: Backend, calls: int) -> Asynchrony:
    """t1, t2 and t3 of single calls, then ``calls`` of both kinds, in parts."""
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
        blocking_s += _blocking_s(backend, size)
        busy_s.append(backend.busy_s(_SINGLE_CALLS))
        queued_s += _queued_s(backend, size)
    t1, t2, t3 = (
        Timing(name=name, samples_s=samples)
        for name, samples in zip(("t1", "t2", "t3"), zip(*spans, strict=True), strict=True)
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


def _blocking_s(backend: Backend, count: int) -> float:
    start_s = time.perf_counter()
    for _ in range(count):
        backend.issue()
        backend.finish()
    return time.perf_counter() - start_s


def _queued_s(backend: Backend, count: int) -> float:
    start_s = time.perf_counter()
    for _ in range(count):
        backend.issue()
    backend.finish()
    return time.perf_counter() - start_s


def numpy_and_torch(device: torch.device, num_rounds: int = 5) -> dict[str, Timing]:
    """The chapter's toy: ten times a random 1000 x 1000 matrix and its product with itself.

    Returns:
        "numpy", "torch" (only until it is queued) and "torch, synchronised".
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

    def timed(work: Callable[[], None], is_waited_for: bool) -> float:
        synchronize()
        start_s = time.perf_counter()
        work()
        if is_waited_for:
            synchronize()
        return time.perf_counter() - start_s

    with_torch()
    return take_turns(
        {
            "numpy": lambda: timed(with_numpy, True),
            "torch": lambda: timed(with_torch, False),
            "torch, synchronised": lambda: timed(with_torch, True),
        },
        num_rounds,
    )
