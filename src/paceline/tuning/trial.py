"""Measures the gain of each candidate on this model and machine, and keeps what helps.

    base      = the objects as they are
    for each candidate, for each of its options:
        other = base + option          copies of model and optimizer, both alive
        pairs   base other | other base | base other | ...
        keep it if the median of base : other is above 1.02 and three of four pairs agree

A slow step is measured on part of the batch. Candidates whose gain depends on the batch size are
then tried first, with one whole step each, and kept above 1.05. Only copies are trained, so the
user's objects and random state do not change. Candidates that were not reached in time are named.
This module must not know which candidates there are, nor where the outcome is kept.
"""

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from ..replica.seeding import kept_random_state, seed_all
from ..speed import Finding, Outcome, Speed
from .allocator import kept_process
from .candidate import Candidate, TrialSubject, cut_batch
from .pairs import (
    WORTH,
    Arm,
    TooLong,
    agree,
    compare,
    difference_of,
    gain_of,
    is_same_loss,
    quartiles,
    time_limit,
)

BUDGET_S = 28.0
_STEP_S = 0.35
"""A step that takes longer is measured on part of the batch."""
_PAIRS_S = 1.5
_REST_S = 10.0
"""Reserved for everything that is measured on part of the batch."""
WORTH_ONCE = 1.05
"""The gain needed where there is time for only one step of each arm."""
_NO_TIME = "no time was left"


def try_all(
    subject: TrialSubject,
    chosen: Speed,
    candidates: Sequence[Candidate],
    budget_s: float = BUDGET_S,
) -> Outcome:
    """Try every candidate that is not chosen by hand, and return the outcome.

    Args:
        chosen: the choice by hand; fields that differ from the default are left as they are.

    Raises:
        Exception: whatever the unchanged step raises, if it fails.
    """
    with kept_process(), kept_random_state():
        return _Trial(subject, chosen, candidates, budget_s).run()


class _Trial:
    def __init__(
        self, subject: TrialSubject, chosen: Speed, candidates: Sequence[Candidate], budget_s: float
    ) -> None:
        self._start_s = perf_counter()
        self._budget_s = budget_s
        self._candidates = candidates
        self._chosen = chosen
        self._full = subject
        self._num_threads = torch.get_num_threads()
        self._subject, self._sample_s = _shortened(subject, chosen, candidates)
        self._findings: list[Finding] = []
        self._is_random = True  # until `_has_random_loss` has looked
        self._is_steady = True

    def run(self) -> Outcome:
        if self._subject is not self._full:
            for candidate in self._candidates:
                if candidate.needs_whole_batch and not self._chosen.is_chosen(candidate.name):
                    self._try_on_whole_batches(candidate)
        self._plain = plain = self._arm(self._chosen, is_fed=False)
        self._is_random = self._has_random_loss()
        speed, base = self._chosen, plain
        for candidate in self._candidates:
            was_tried = any(finding.name == candidate.name for finding in self._findings)
            if self._chosen.is_chosen(candidate.name) or candidate.needs_feed or was_tried:
                continue
            for value in candidate.options(self._subject, speed):
                trial_speed = speed.having(candidate.name, value)
                faster = self._faster_arm(base, trial_speed, candidate)
                if faster is not None:
                    speed, base = trial_speed, faster
        before_s, after_s = self._remeasure(plain, base)
        gains = [finding.gain for finding in self._findings if _is_in_total(finding)]
        self._is_steady &= agree(math.prod(gains), before_s / max(after_s, 1e-9))
        if base is not plain and before_s <= WORTH * after_s:
            speed, base, after_s = self._chosen, plain, before_s
            self._withdraw()
        speed = self._try_loader(speed, base)
        return Outcome(
            speed=speed,
            findings=tuple(self._findings),
            before_s=before_s,
            after_s=after_s,
            num_samples=self._subject.num_samples,
            batch_size=self._full.num_samples,
            took_s=perf_counter() - self._start_s,
            is_steady=self._is_steady,
        )

    def _try_on_whole_batches(self, candidate: Candidate) -> None:
        """Compare the second step of two arms: there is no time for more."""
        whole_s = self._sample_s * self._full.num_samples
        for value in candidate.options(self._full, self._chosen):
            finding = Finding(name=candidate.name, what=candidate.words(value), is_apart=True)
            trial_speed = self._chosen.having(candidate.name, value)
            limit_s = self._left_s - _REST_S
            if 4 * whole_s > limit_s:
                self._note(finding, reason=f"not tried: a step takes {whole_s:.1f} s")
                continue
            try:
                with time_limit(limit_s):
                    arms = [Arm(self._full, speed, self._candidates, is_fed=False)
                            for speed in (self._chosen, trial_speed)]  # fmt: skip
            except TooLong:
                self._note(finding, was_tried=False, reason=_NO_TIME)
                continue
            except Exception as error:  # out of memory, for example
                self._note(finding, reason=f"failed: {_first_line(error)}")
                continue
            gain = arms[0].second_s / arms[1].second_s
            is_kept = gain > WORTH_ONCE and not difference_of(*arms, is_random=self._is_random)
            self._note(finding, gain=gain, low=gain, high=gain, is_kept=is_kept,
                       reason="on a whole batch")  # fmt: skip
            if is_kept:
                self._chosen = trial_speed

    def _note(self, finding: Finding, **values: Any) -> None:
        self._findings.append(replace(finding, **values))

    def _withdraw(self) -> None:
        """Mark the kept options as not kept: measured together they did not help."""
        self._findings = [
            replace(finding, is_kept=False, reason="no gain when measured again")
            if _is_in_total(finding)
            else finding
            for finding in self._findings
        ]

    @property
    def _left_s(self) -> float:
        return self._budget_s - (perf_counter() - self._start_s)

    def _arm(self, speed: Speed, *, is_fed: bool) -> Arm:
        torch.set_num_threads(self._num_threads)  # the last block may have left another number
        return Arm(self._subject, speed, self._candidates, is_fed=is_fed)

    def _has_random_loss(self) -> bool:
        """Whether the loss differs under one seed, so that two arms may differ."""
        subject = self._subject

        def loss() -> float:
            seed_all(0)
            with torch.no_grad():
                return float(subject.forward(copy.deepcopy(subject.objects.model), subject.batch))

        return not is_same_loss(loss(), loss())

    def _faster_arm(self, base: Arm, speed: Speed, candidate: Candidate) -> Arm | None:
        """The arm with this option if it is worth keeping, else None; adds a finding."""
        reserve_s = 2.0
        what = candidate.words(getattr(speed, candidate.name))
        finding = Finding(name=candidate.name, what=what)
        limit_s = self._left_s - reserve_s - _PAIRS_S
        try:
            if limit_s <= 1.0:
                raise TooLong
            with time_limit(limit_s):
                other = self._arm(speed, is_fed=candidate.needs_feed)
        except TooLong:
            self._note(finding, was_tried=False, reason=_NO_TIME)
            return None
        except Exception as error:  # whatever a compiler or a kernel raises: it is not available
            self._note(finding, reason=f"failed: {_first_line(error)}")
            return None
        difference = difference_of(base, other, is_random=self._is_random)
        if difference and not candidate.needs_feed:
            self._note(finding, reason=difference)
            return None
        (low, median, high), is_steady = gain_of(
            base, other, lambda: min(_PAIRS_S, self._left_s - reserve_s)
        )
        self._is_steady &= is_steady
        is_kept = median > WORTH and low > 1.0
        once_s = other.first_s - self._plain.first_s if candidate.name == "compile" else 0.0
        finding = replace(
            finding, gain=median, low=low, high=high, is_kept=is_kept, once_s=max(0.0, once_s),
            is_apart=candidate.needs_feed,
        )  # fmt: skip
        self._findings.append(self._replacing(finding) if is_kept else finding)
        if not is_kept:
            other.close()
        return other if is_kept else None

    def _replacing(self, best: Finding) -> Finding:
        """Replace a kept option of the same candidate; ``best`` with the gains of both."""
        for index, previous in enumerate(self._findings):
            if previous.name == best.name and previous.is_kept:
                reason = f"{best.what} is faster"
                self._findings[index] = replace(previous, is_kept=False, reason=reason)
                gains = [getattr(best, name) * previous.gain for name in ("gain", "low", "high")]
                best = replace(best, gain=gains[0], low=gains[1], high=gains[2])
        return best

    def _remeasure(self, plain: Arm, best: Arm) -> tuple[float, float]:
        """Measure the whole choice in pairs; seconds a step before and after."""
        if best is plain:
            step_s = plain.block_s(1)
            return step_s, step_s
        times: tuple[list[float], list[float]] = ([], [])
        compare(plain, best, 1.5, times)
        return statistics.median(times[0]), statistics.median(times[1])

    def _try_loader(self, speed: Speed, best: Arm) -> Speed:
        """Compare the loader with one cached batch; ``speed`` with the options that help it."""
        candidates = [candidate for candidate in self._candidates if candidate.needs_feed]
        if self._subject.feed is None or not candidates or (fed := self._fed_arm(speed)) is None:
            return speed
        low, ceiling, high = quartiles(compare(fed, best, min(1.5, self._left_s)))
        finding = Finding(name="loader", what="one cached batch", gain=ceiling, low=low, high=high,
                          is_apart=True)  # fmt: skip
        if ceiling <= WORTH:
            self._note(finding, name="loader_workers", reason="the loader keeps up")
            return speed
        hint = "; a higher num_workers may hide it" * (not self._subject.may_load_elsewhere)
        self._note(finding, reason=f"the loader costs this much{hint}")
        for candidate in candidates:
            if self._chosen.is_chosen(candidate.name):
                continue
            for value in candidate.options(self._subject, speed):
                trial_speed = speed.having(candidate.name, value)
                faster = self._faster_arm(fed, trial_speed, candidate)
                if faster is not None:
                    fed.close()
                    speed, fed = trial_speed, faster
        fed.close()
        return speed

    def _fed_arm(self, speed: Speed) -> Arm | None:
        """The arm with batches from the loader; None, with a finding, if it cannot be had."""
        finding = Finding(name="loader_workers", what="loader", is_apart=True)
        try:
            if self._left_s < 1.0:
                raise TooLong
            with time_limit(self._left_s):
                return self._arm(speed, is_fed=True)
        except TooLong:
            self._note(finding, was_tried=False, reason=_NO_TIME)
        except Exception as error:  # samples that the user's code cannot put into one batch
            self._note(finding, reason=f"failed: {_first_line(error)}")
        return None


def _is_in_total(finding: Finding) -> bool:
    """Whether the gain is part of the time before and after the whole choice."""
    return finding.is_kept and not finding.is_apart


def _shortened(
    subject: TrialSubject, speed: Speed, candidates: Sequence[Candidate]
) -> tuple[TrialSubject, float]:
    """Cut the batch if a whole step is too slow to be measured often.

    Returns:
        The subject with that batch, and the seconds a step takes per sample.
    """
    short = cut_batch(subject, min(subject.num_samples, max(2, subject.num_samples // 16)))
    arm = Arm(short, speed, candidates, is_fed=False)
    sample_s = arm.block_s(1) / short.num_samples
    arm.close()
    if sample_s * subject.num_samples <= _STEP_S:
        return subject, sample_s
    return cut_batch(subject, max(short.num_samples, int(_STEP_S / sample_s))), sample_s


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:120]
