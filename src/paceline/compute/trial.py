"""Measures what each candidate is worth on this model and machine, and keeps what helps.

    base      = the objects as they are
    for each candidate, for each of its options:
        other = base + option          copies of model and optimizer, both alive
        pairs   base other | other base | base other | ...
        keep it if the median of base : other is above 1.02 and three of four pairs agree

Only copies are trained, so the user's objects and random state are as before. The time is limited:
what was not reached is named, and where a step is slow a part of the batch is measured on. This
module must not know which candidates there are, but for those that are a setting of the process,
nor where the outcome is kept.
"""

import copy
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..data.trees import apply as change_tensors
from . import allocator
from .candidate import Candidate, Objects, Subject
from .deadline import TooLong, time_limit
from .pairs import WORTH, compare, quartiles
from .precision import autocast
from .seeding import kept_random_state, seed_all
from .speed import Finding, Outcome, Speed, Value

BUDGET_S = 28.0
_STEP_S = 0.35
"""Where a step takes longer it is measured on a part of the batch."""
_PAIRS_S = 1.5
_PREFETCHED = 2
"""Batches that a process of torch's loader has ready."""
_SAME_LOSS = 1e-3
"""Relative; a compiled or reordered sum differs by about 1e-6."""


class Arm:
    """One way to compute, on its own copy of the objects.

    Attributes:
        first_s: seconds of the first step, compilation included.
        first_loss: of it, from the same parameters, batch and random state in every arm.
    """

    def __init__(
        self, subject: Subject, speed: Speed, candidates: Sequence[Candidate], *, is_fed: bool
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
            self.step()
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
        allocator.keep(self.speed.keep_memory, self._subject.share)
        return True

    def close(self) -> None:
        torch.set_num_threads(self._before)
        self._batches = None


def try_all(
    subject: Subject, given: Speed, candidates: Sequence[Candidate], budget_s: float = BUDGET_S
) -> Outcome:
    """Try every candidate that is not chosen by hand; the outcome.

    Args:
        given: what was chosen by hand: fields that are not the default are left as they are.

    Raises:
        Exception: the step fails as it is, whatever it raises.
    """
    was_kept, threads = allocator.is_kept(), torch.get_num_threads()
    try:
        with kept_random_state():
            return _Trial(subject, given, candidates, budget_s).run()
    finally:
        allocator.restore(was_kept)
        torch.set_num_threads(threads)


class _Trial:
    def __init__(
        self, subject: Subject, given: Speed, candidates: Sequence[Candidate], budget_s: float
    ) -> None:
        self._start_s = perf_counter()
        self._budget_s = budget_s
        self._candidates = candidates
        self._given = given
        self._full = subject
        self._subject = _fitted(subject, given, candidates)
        self._findings: list[Finding] = []

    def run(self) -> Outcome:
        plain = self._arm(self._given, is_fed=False)
        self._is_random = self._has_random_loss()
        speed, base = self._given, plain
        for one in self._candidates:
            if self._given.is_chosen(one.name) or one.needs_feed:
                continue
            for value in one.options(self._subject, speed):
                tried = speed.having(one.name, value)
                other = self._better(base, tried, one, value)
                if other is not None:
                    speed, base = tried, other
        before_s, after_s = self._together(plain, base)
        if base is not plain and before_s <= WORTH * after_s:
            speed, base, after_s = self._given, plain, before_s
            self._withdraw()
        speed = self._fed(speed, base)
        return Outcome(
            speed=speed,
            findings=tuple(self._findings),
            before_s=before_s,
            after_s=after_s,
            num_samples=self._subject.num_samples,
            batch_size=self._full.num_samples,
            took_s=perf_counter() - self._start_s,
        )

    def _withdraw(self) -> None:
        """What seemed to help did not when all of it was measured once more."""
        self._findings = [
            replace(one, is_kept=False, reason="not when measured again") if one.is_kept else one
            for one in self._findings
        ]

    @property
    def _left_s(self) -> float:
        return self._budget_s - (perf_counter() - self._start_s)

    def _arm(self, speed: Speed, *, is_fed: bool) -> Arm:
        return Arm(self._subject, speed, self._candidates, is_fed=is_fed)

    def _has_random_loss(self) -> bool:
        """Whether the model draws random numbers, so that two ways to compute may differ."""
        losses = []
        for seed in (0, 1):
            seed_all(seed)
            with torch.no_grad():
                model = copy.deepcopy(self._subject.objects.model)
                losses.append(float(self._subject.forward(model, self._subject.batch)))
        return losses[0] != losses[1]

    def _better(self, base: Arm, speed: Speed, one: Candidate, value: Value) -> Arm | None:
        """The arm with this option if it is worth keeping; what was found is noted."""
        reserve_s = 2.0
        note = Finding(name=one.name, what=one.words(value))
        limit_s = self._left_s - reserve_s - _PAIRS_S
        try:
            if limit_s <= 1.0:
                raise TooLong
            with time_limit(limit_s):
                other = self._arm(speed, is_fed=one.needs_feed)
        except TooLong:
            self._findings.append(replace(note, was_tried=False, reason="no time was left"))
            return None
        except Exception as error:  # whatever a compiler or a kernel raises: it cannot be had
            self._findings.append(replace(note, reason=f"cannot be had: {_first_line(error)}"))
            return None
        if not one.needs_feed and self._differs(base, other):
            reason = f"changes the loss: {base.first_loss:.6g} to {other.first_loss:.6g}"
            self._findings.append(replace(note, reason=reason))
            return None
        ratios = compare(base, other, min(_PAIRS_S, self._left_s - reserve_s))
        low, middle, high = quartiles(ratios)
        is_kept = middle > WORTH and low > 1.0
        once_s = other.first_s - base.first_s if one.name == "compile" else 0.0
        found = replace(
            note, gain=middle, low=low, high=high, is_kept=is_kept, once_s=max(0.0, once_s),
            is_fed=one.needs_feed,
        )  # fmt: skip
        self._findings.append(self._beyond_its_kin(found) if is_kept else found)
        if not is_kept:
            other.close()
        return other if is_kept else None

    def _differs(self, base: Arm, other: Arm) -> bool:
        """Whether an arm computes something else than the best so far."""
        if not math.isfinite(other.first_loss):
            return math.isfinite(base.first_loss)
        if self._is_random or other.speed.precision != base.speed.precision:
            return False
        gap = abs(other.first_loss - base.first_loss)
        return not gap <= _SAME_LOSS * max(1.0, abs(base.first_loss))

    def _beyond_its_kin(self, found: Finding) -> Finding:
        """Another option of the same kind was kept before: this one takes its place."""
        for number, one in enumerate(self._findings):
            if one.name == found.name and one.is_kept:
                self._findings[number] = replace(one, is_kept=False, reason=f"{found.what} is more")
                gains = [getattr(found, name) * one.gain for name in ("gain", "low", "high")]
                found = replace(found, gain=gains[0], low=gains[1], high=gains[2])
        return found

    def _together(self, plain: Arm, best: Arm) -> tuple[float, float]:
        """Seconds a step before and after, measured in turn once more."""
        if best is plain:
            step_s = plain.block_s(1)
            return step_s, step_s
        times: tuple[list[float], list[float]] = ([], [])
        compare(plain, best, 1.5, times)
        return statistics.median(times[0]), statistics.median(times[1])

    def _fed(self, speed: Speed, best: Arm) -> Speed:
        """The loader's part: how far from one cached batch, and what brings it nearer."""
        mine = [one for one in self._candidates if one.needs_feed]
        if self._subject.feed is None or not mine or self._left_s < 1.0:
            return speed
        fed = self._arm(speed, is_fed=True)
        low, ceiling, high = quartiles(compare(fed, best, min(1.5, self._left_s)))
        if ceiling <= WORTH:
            self._findings.append(
                Finding(name="loader_workers", what="loader", gain=ceiling, low=low, high=high,
                        reason="of one cached batch: it keeps up", is_fed=True)
            )  # fmt: skip
            return speed
        self._findings.append(
            Finding(name="loader", what="one cached batch", gain=ceiling, low=low, high=high,
                    reason="so much the loader takes", is_fed=True)
        )  # fmt: skip
        for one in mine:
            if self._given.is_chosen(one.name):
                continue
            for value in one.options(self._subject, speed):
                tried = speed.having(one.name, value)
                other = self._better(fed, tried, one, value)
                if other is not None:
                    fed.close()
                    speed, fed = tried, other
        fed.close()
        return speed


def _fitted(subject: Subject, speed: Speed, candidates: Sequence[Candidate]) -> Subject:
    """The subject with so much of its batch that a step is not too slow to be measured often."""
    few = _cut(subject, min(subject.num_samples, max(2, subject.num_samples // 16)))
    arm = Arm(few, speed, candidates, is_fed=False)
    each_s = arm.block_s(1) / few.num_samples
    arm.close()
    if each_s * subject.num_samples <= _STEP_S:
        return subject
    num_samples = int(_STEP_S / each_s)
    return _cut(subject, max(few.num_samples, num_samples))


def _cut(subject: Subject, num_samples: int) -> Subject:
    whole = subject.num_samples

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:num_samples] if tensor.ndim and len(tensor) == whole else tensor

    sizes = subject.objects.sizes | {num_samples}
    return replace(
        subject,
        batch=change_tensors(cut, subject.batch),
        num_samples=num_samples,
        share=subject.share * num_samples / whole,
        feed=subject.feed if num_samples == whole else None,
        objects=replace(subject.objects, sizes=frozenset(sizes)),
    )


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:120]
