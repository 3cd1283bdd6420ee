"""One way to compute, as a trial measures it: steps on a copy of the user's objects.

    Arm(subject, speed): a copy -- every candidate applied --> step() ... block_s(n)

What belongs to the process, its threads and what its heap keeps, is put into effect before each
block, so arms take turns. This module must not know which candidates there are, but for those.
"""

import copy
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..replica.seeding import seed_all
from ..speed import Speed
from . import allocator
from .candidate import Candidate, Objects, TrialSubject
from .precision import autocast

_PREFETCHED = 2
"""Batches that a process of torch's loader has ready."""


class Arm:
    """One way to compute, on its own copy of the objects.

    Attributes:
        first_s: seconds of the first step, compilation included.
        second_s: of the second step.
        first_loss: of the first, from the same parameters, batch and random state in every arm.
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
        loss.backward()  # type: ignore[no-untyped-call]
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
