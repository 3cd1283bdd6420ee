"""Two ways to compute, measured in turn until it is clear which is faster.

    Arm(subject, speed): a copy of the user's objects -- every candidate applied --> block_s(n)
    compare(base, other):  base other | other base | base other | ...        a ratio for each pair

Other load on the machine affects both arms, and the order within a pair alternates, so neither
always finds the caches as the other left them. Settings of the process (threads, kept memory) are
applied before each block. A compiler or a first step may take too long and cannot be asked to stop:
`time_limit` ends it by SIGALRM and restores a timer that was already running. This module must not
know which candidates there are, except for those settings.
"""

import copy
import math
import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from types import FunctionType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ..errors import ConfigError
from ..replica.seeding import seed_all
from ..speed import Speed
from ..store.optimizer_copy import REPLACED
from . import allocator
from .candidate import Candidate, Objects, TrialSubject
from .candidates import autocast


class TooLong(BaseException):
    """The block exceeded its time limit; a BaseException, so a compiler does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TooLong`` in the block after ``seconds``; no limit outside the main thread.

    A timer of somebody else is stopped meanwhile and runs on afterwards. There is no limit either
    where SIGALRM has a handler that Python did not install and could not restore.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGALRM) is None:
        yield
        return

    is_armed = False

    def raise_once(number: int, frame: object) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise TooLong

    other_s, other_interval_s = signal.setitimer(signal.ITIMER_REAL, 0.0)
    start_s = perf_counter()
    handler: Callable[..., object] | int | None = signal.signal(signal.SIGALRM, raise_once)
    try:
        try:
            is_armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            is_armed = False  # the alarm may still interrupt this line,
    finally:  # but not these: it has raised, or no longer can
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if other_s:
            left_s = other_s - (perf_counter() - start_s)
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s), other_interval_s)


_PREFETCHED = 2
"""Batches that each worker process of a DataLoader has ready: torch's ``prefetch_factor``."""
_SAME_LOSS = 1e-3
"""Relative tolerance; a compiled or reordered sum differs by about 1e-6."""


class Arm:
    """One way to compute, on its own copy of the objects.

    Attributes:
        first_s: seconds of the first step, including compilation.
        second_s: seconds of the second step.
        first_loss: loss of the first step, from the same parameters, batch and random state in
            every arm.
        second_loss: loss of the second step, after the first update.
    """

    def __init__(
        self, subject: TrialSubject, speed: Speed, candidates: Sequence[Candidate], *, is_fed: bool
    ) -> None:
        self._objects = objects = _copy_of(subject.objects)
        self._subject = subject
        self.speed = speed
        self._threads = speed.threads or torch.get_num_threads()
        self._threads_before = torch.get_num_threads()
        self._model, self._optimizer = objects.model, objects.optimizer
        torch.set_num_threads(self._threads)
        try:
            for candidate in candidates:
                candidate.apply(self._objects, getattr(speed, candidate.name))
            self._batches: Iterator[Any] | None = None
            self._num_waiting = 0
            if is_fed:
                assert subject.feed is not None
                self._batches = subject.feed(speed)
                self._num_waiting = _PREFETCHED * max(speed.loader_workers, subject.loader_workers)
            seed_all(0)
            start_s = perf_counter()
            self.first_loss = float(self.step())
            self.first_s = perf_counter() - start_s
            start_s = perf_counter()
            self.second_loss = float(self.step())
            self.second_s = perf_counter() - start_s
        finally:
            torch.set_num_threads(self._threads_before)

    def step(self) -> Tensor:
        """Make one training step and return its loss."""
        subject = self._subject
        batch = subject.batch if self._batches is None else next(self._batches)
        self._optimizer.zero_grad()
        with autocast(subject.device, self.speed.precision):
            loss = subject.forward(self._model, batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def block_s(self, num_steps: int) -> float:
        """Seconds a step, the mean of ``num_steps``."""
        if self._apply_process_settings():
            self.step()
        for _ in range(self._num_waiting):  # batches that were loaded while the other arm computed
            self.step()
        _wait(self._subject.device)
        start_s = perf_counter()
        for _ in range(num_steps):
            self.step()
        _wait(self._subject.device)
        return (perf_counter() - start_s) / num_steps

    def _apply_process_settings(self) -> bool:
        """Set this arm's threads and heap setting; return whether anything changed."""
        has_changed = torch.get_num_threads() != self._threads
        if has_changed:
            torch.set_num_threads(self._threads)
        if allocator.is_kept() == self.speed.keep_memory:
            return has_changed
        allocator.keep(self.speed.keep_memory)
        return True

    def close(self) -> None:
        torch.set_num_threads(self._threads_before)
        self._batches = None


def _copy_of(objects: Objects) -> Objects:
    """Copies of model and optimizer, the latter with the attributes that torch does not copy.

    Raises:
        ConfigError: a copy would still compute with the original.
    """
    for name, module in objects.model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, FunctionType) and not hasattr(module, "_orig_mod"):
            raise ConfigError(
                f"--fast auto trains copies of the model, but {name or 'its own'} forward() was "
                "replaced by a function, which a copy shares with it: use model.compile(), or a "
                "method of the class, or leave --fast out"
            )
    memo: dict[int, Any] = {}
    model, optimizer = copy.deepcopy((objects.model, objects.optimizer), memo)
    for name, value in vars(objects.optimizer).items():
        if name in vars(optimizer) or name in REPLACED:
            continue
        try:
            vars(optimizer)[name] = copy.deepcopy(value, memo)
        except Exception:  # a lock or an open file has no copy: both have it
            vars(optimizer)[name] = value
    return replace(objects, model=model, optimizer=optimizer)


def is_same_loss(expected: float, actual: float) -> bool:
    """Whether two losses are equal up to rounding, or neither is a number."""
    if not math.isfinite(actual):
        return not math.isfinite(expected)
    return abs(actual - expected) <= _SAME_LOSS * max(1.0, abs(expected))


def difference_of(base: Arm, other: Arm, *, is_random: bool) -> str:
    """How the losses of ``other`` differ from those of ``base``; empty if they do not.

    Args:
        is_random: whether they may differ, as long as they are numbers.
    """
    may_differ = is_random or other.speed.precision != base.speed.precision
    for name, expected, actual in (
        ("the loss", base.first_loss, other.first_loss),
        ("the loss after an update", base.second_loss, other.second_loss),
    ):
        may_pass = may_differ and math.isfinite(actual)
        if not (may_pass or is_same_loss(expected, actual)):
            return f"changes {name}: {expected:.6g} to {actual:.6g}"
    return ""


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


WORTH = 1.02
"""The gain above which an option is kept: 2 %."""
_BLOCK_S = 0.06
"""The shortest block of steps: the resolution of clock and scheduler does not matter in it."""
_LEAST_PAIRS, _MOST_PAIRS = 4, 12


IMPLAUSIBLE = 4.0
"""A gain above this is measured again: other load may have slowed down the base."""
_DISTURBED = 1.5
"""If two measurements of a gain differ by more than this factor, the machine was disturbed."""

Quartiles: TypeAlias = tuple[float, float, float]


class Timed(Protocol):
    """One way to compute."""

    def block_s(self, num_steps: int) -> float:
        """Seconds a step, the mean of ``num_steps``."""


def compare(
    base: Timed, other: Timed, limit_s: float, times: tuple[list[float], list[float]] | None = None
) -> list[float]:
    """Measure in pairs whose order alternates; the ratio base : other of each.

    It ends early when the middle half of the ratios lies clearly on one side of ``WORTH``.

    Args:
        limit_s: no pair begins after this, except the first.
        times: the seconds a step are appended here, first those of ``base``, then of ``other``.
    """
    ratios: list[float] = []
    num_steps = max(1, round(_BLOCK_S / max(1e-6, base.block_s(1))))
    start_s = perf_counter()
    while len(ratios) < _MOST_PAIRS:
        if ratios and perf_counter() - start_s > limit_s:
            break
        if len(ratios) >= _LEAST_PAIRS and _is_clear(ratios):
            break
        first, second = (base, other) if len(ratios) % 2 else (other, base)
        seconds = {id(first): first.block_s(num_steps)}
        seconds[id(second)] = second.block_s(num_steps)
        ratios.append(seconds[id(base)] / seconds[id(other)])
        if times is not None:
            times[0].append(seconds[id(base)])
            times[1].append(seconds[id(other)])
    return ratios


def gain_of(base: Timed, other: Timed, limit_s: Callable[[], float]) -> tuple[Quartiles, bool]:
    """The gain of ``other`` over ``base``, and whether the measurement was steady.

    An implausible gain is measured twice, and the smaller result counts.
    """
    first = quartiles(compare(base, other, limit_s()))
    if first[1] <= IMPLAUSIBLE:
        return first, True
    second = quartiles(compare(base, other, limit_s()))
    smaller, larger = sorted((first, second), key=lambda gain: gain[1])
    return smaller, agree(larger[1], smaller[1])


def agree(gain: float, repeated: float) -> bool:
    """Whether a gain is plausible, or a repeated measurement does not contradict it."""
    return gain <= IMPLAUSIBLE or gain <= _DISTURBED * repeated


def _is_clear(ratios: Sequence[float]) -> bool:
    low, _, high = quartiles(ratios)
    margin = (high - low) / 2
    return low - margin > WORTH or high + margin < WORTH


def quartiles(values: Sequence[float]) -> Quartiles:
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
