"""Two ways to compute, measured in turn until it is clear which is faster.

    Arm(subject, speed): a copy of the user's objects -- every candidate applied --> block_s(n)
    compare(base, other):  base other | other base | base other | ...        a ratio for each pair

What else goes on at a machine meets both, and what they do to each other's caches changes sides.
What belongs to the process, its threads and what its heap keeps, is put into effect before each
block. What may take too long and cannot be asked to stop, a compiler, a first step, is ended by an
alarm of the operating system (`time_limit`); somebody else's alarm goes on afterwards. This module
must not know which candidates there are, but for those.
"""

import copy
import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ..replica.seeding import seed_all
from ..speed import Speed
from . import allocator
from .candidate import Candidate, Objects, TrialSubject
from .candidates import autocast


class TooLong(BaseException):
    """The block took longer than it may; a BaseException: a compiler's ``except`` lets it by."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TooLong`` in the block after so long; in the main thread only, where it can be."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    is_armed = False

    def ring(number: int, frame: object) -> None:
        if is_armed:  # an alarm during the cleanup must not interrupt it
            raise TooLong

    others_s, _ = signal.getitimer(signal.ITIMER_REAL)
    start_s = perf_counter()
    old: Callable[..., object] | int | None = signal.signal(signal.SIGALRM, ring)
    try:
        is_armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old)
        if others_s:  # somebody else's alarm goes on
            left_s = others_s - (perf_counter() - start_s)
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s))


_PREFETCHED = 2
"""Batches that a process of torch's loader has ready."""


class Arm:
    """One way to compute, on its own copy of the objects.

    Attributes:
        first_s: seconds of the first step, compilation included.
        second_s: of the second step.
        first_loss: of the first, from the same parameters, batch and random state in every arm.
        second_loss: of the second, so of what the first update has made of the parameters.
    """

    def __init__(
        self, subject: TrialSubject, speed: Speed, candidates: Sequence[Candidate], *, is_fed: bool
    ) -> None:
        model, optimizer = copy.deepcopy((subject.objects.model, subject.objects.optimizer))
        self._objects = Objects(model=model, optimizer=optimizer, sizes=subject.objects.sizes)
        self._subject = subject
        self.speed = speed
        self._threads = speed.threads or torch.get_num_threads()
        self._before = torch.get_num_threads()
        self._model, self._optimizer = model, optimizer
        torch.set_num_threads(self._threads)
        try:
            for one in candidates:
                one.apply(self._objects, getattr(speed, one.name))
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
            torch.set_num_threads(self._before)

    def step(self) -> Tensor:
        """One training step; its loss."""
        subject = self._subject
        batch = subject.batch if self._batches is None else next(self._batches)
        self._optimizer.zero_grad()
        with autocast(subject.device, self.speed.precision):
            loss = subject.forward(self._model, batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def block_s(self, num_steps: int) -> float:
        """Seconds a step, over ``num_steps`` of them."""
        if self._take_over():
            self.step()
        for _ in range(self._num_waiting):  # batches that were loaded while the other arm computed
            self.step()
        _wait(self._subject.device)
        start_s = perf_counter()
        for _ in range(num_steps):
            self.step()
        _wait(self._subject.device)
        return (perf_counter() - start_s) / num_steps

    def _take_over(self) -> bool:
        """Put into effect what belongs to the whole process; whether anything had to change."""
        is_other = torch.get_num_threads() != self._threads
        if is_other:
            torch.set_num_threads(self._threads)
        if allocator.is_kept() == self.speed.keep_memory:
            return is_other
        allocator.keep(self.speed.keep_memory)
        return True

    def close(self) -> None:
        torch.set_num_threads(self._before)
        self._batches = None


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


WORTH = 1.02
"""What is kept is faster by more than 2 %."""
_BLOCK_S = 0.06
"""A block of steps takes at least this: a clock's and a scheduler's grain disappear in it."""
_LEAST_PAIRS, _MOST_PAIRS = 4, 12


IMPLAUSIBLE = 4.0
"""A gain above this is measured again: what it was measured against may have been held up."""
_DISTURBED = 1.5
"""Two measurements of a gain that are further apart tell of the machine and not of the option."""

Quartiles: TypeAlias = tuple[float, float, float]


class Timed(Protocol):
    """One way to compute."""

    def block_s(self, num_steps: int) -> float:
        """Seconds a step, over so many of them."""


def compare(
    base: Timed, other: Timed, limit_s: float, times: tuple[list[float], list[float]] | None = None
) -> list[float]:
    """Ratios of base : other, pair by pair, the order of the two turning each time.

    It ends early when the middle half of the pairs lies clearly on one side of what is kept.
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
    """What ``other`` is worth, and whether the machine was left alone, as far as that shows.

    An implausible gain is measured twice; the measurement that says less counts.
    """
    result = quartiles(compare(base, other, limit_s()))
    if result[1] <= IMPLAUSIBLE:
        return result, True
    again = quartiles(compare(base, other, limit_s()))
    less = min(result, again, key=lambda one: one[1])
    return less, agree(max(result[1], again[1]), less[1])


def agree(more: float, less: float) -> bool:
    """Whether a gain and a later measurement of it do not contradict each other."""
    return more <= IMPLAUSIBLE or more <= _DISTURBED * less


def _is_clear(ratios: Sequence[float]) -> bool:
    low, _, high = quartiles(ratios)
    margin = (high - low) / 2
    return low - margin > WORTH or high + margin < WORTH


def quartiles(values: Sequence[float]) -> Quartiles:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
