"""Measures what each candidate is worth on this model and machine, and keeps what helps.

    base      = the objects as they are
    for each candidate, for each of its options:
        other = base + option          copies of model and optimizer, both alive
        pairs   base other | other base | base other | ...
        keep it if the median of base : other is above 1.02 and three of four pairs agree

Where only a part of a batch is measured on, what depends on the batch is tried first, with one
whole step each, and kept above 1.05.

Only copies are trained, so the user's objects and random state are as before. The time is limited:
what was not reached is named, and where a step is slow a part of the batch is measured on. This
module must not know which candidates there are, nor where the outcome is kept.
"""

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from ..data.feed import apply as change_tensors
from ..replica.seeding import kept_random_state, seed_all
from ..speed import Finding, Outcome, Speed, Value
from .allocator import kept_process
from .candidate import Candidate, TrialSubject
from .pairs import WORTH, Arm, TooLong, agree, compare, gain_of, quartiles, time_limit

BUDGET_S = 28.0
_STEP_S = 0.35
"""Where a step takes longer it is measured on a part of the batch."""
_PAIRS_S = 1.5
_REST_S = 10.0
"""For all that is measured on a part of the batch."""
WORTH_ONCE = 1.05
"""What is kept where there is time for one step each."""
_SAME_LOSS = 1e-3
"""Relative; a compiled or reordered sum differs by about 1e-6."""
_NONE_TRIED = "; more of its num_workers may hide that"


def try_all(
    subject: TrialSubject, given: Speed, candidates: Sequence[Candidate], budget_s: float = BUDGET_S
) -> Outcome:
    """Try every candidate that is not chosen by hand; the outcome.

    Args:
        given: what was chosen by hand: fields that are not the default are left as they are.

    Raises:
        Exception: the step fails as it is, whatever it raises.
    """
    with kept_process(), kept_random_state():
        return _Trial(subject, given, candidates, budget_s).run()


class _Trial:
    def __init__(
        self, subject: TrialSubject, given: Speed, candidates: Sequence[Candidate], budget_s: float
    ) -> None:
        self._start_s = perf_counter()
        self._budget_s = budget_s
        self._candidates = candidates
        self._given = given
        self._full = subject
        self._subject, self._sample_s = _fitted(subject, given, candidates)
        self._findings: list[Finding] = []
        self._is_random = True  # unless it is found that it is not
        self._is_steady = True

    def run(self) -> Outcome:
        if self._subject is not self._full:
            for one in self._candidates:
                if one.needs_whole_batch and not self._given.is_chosen(one.name):
                    self._try_on_whole_batches(one)
        self._plain = plain = self._arm(self._given, is_fed=False)
        self._is_random = self._has_random_loss()
        speed, base = self._given, plain
        for one in self._candidates:
            is_found = any(finding.name == one.name for finding in self._findings)
            if self._given.is_chosen(one.name) or one.needs_feed or is_found:
                continue
            for value in one.options(self._subject, speed):
                tried = speed.having(one.name, value)
                other = self._better(base, tried, one, value)
                if other is not None:
                    speed, base = tried, other
        before_s, after_s = self._together(plain, base)
        kept = [one.gain for one in self._findings if one.is_kept and not one.is_apart]
        self._is_steady &= agree(math.prod(kept), before_s / max(after_s, 1e-9))
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
            is_steady=self._is_steady,
        )

    def _try_on_whole_batches(self, one: Candidate) -> None:
        """The second step of one arm, then of the other: more would take too long."""
        whole_s = self._sample_s * self._full.num_samples
        for value in one.options(self._full, self._given):
            note = Finding(name=one.name, what=one.words(value), is_apart=True)
            tried, limit_s = self._given.having(one.name, value), self._left_s - _REST_S
            if 4 * whole_s > limit_s:
                reason = f"not tried: a step takes {whole_s:.1f} s"
                self._findings.append(replace(note, reason=reason))
                continue
            try:
                with time_limit(limit_s):
                    arms = [Arm(self._full, speed, self._candidates, is_fed=False)
                            for speed in (self._given, tried)]  # fmt: skip
            except TooLong:
                self._findings.append(replace(note, was_tried=False, reason="no time was left"))
                continue
            except Exception as error:  # memory ends, for one
                reason = f"cannot be had: {_first_line(error)}"
                self._findings.append(replace(note, reason=reason))
                continue
            gain = arms[0].second_s / arms[1].second_s
            is_kept = gain > WORTH_ONCE and not self._difference(*arms)
            self._findings.append(
                replace(note, gain=gain, low=gain, high=gain, is_kept=is_kept,
                        reason="of a whole batch's step")
            )  # fmt: skip
            if is_kept:
                self._given = tried

    def _withdraw(self) -> None:
        """What seemed to help did not when all of it was measured once more."""
        self._findings = [
            replace(finding, is_kept=False, reason="not when measured again")
            if finding.is_kept and not finding.is_apart
            else finding
            for finding in self._findings
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
        if not one.needs_feed and (difference := self._difference(base, other)):
            self._findings.append(replace(note, reason=difference))
            return None
        (low, middle, high), is_steady = gain_of(
            base, other, lambda: min(_PAIRS_S, self._left_s - reserve_s)
        )
        self._is_steady &= is_steady
        is_kept = middle > WORTH and low > 1.0
        once_s = other.first_s - self._plain.first_s if one.name == "compile" else 0.0
        result = replace(
            note, gain=middle, low=low, high=high, is_kept=is_kept, once_s=max(0.0, once_s),
            is_apart=one.needs_feed,
        )  # fmt: skip
        self._findings.append(self._beyond_its_kin(result) if is_kept else result)
        if not is_kept:
            other.close()
        return other if is_kept else None

    def _difference(self, base: Arm, other: Arm) -> str:
        """What an arm computes otherwise than the best so far; empty: nothing."""
        may_differ = self._is_random or other.speed.precision != base.speed.precision
        for what, wanted, found in (
            ("the loss", base.first_loss, other.first_loss),
            ("the loss after an update", base.second_loss, other.second_loss),
        ):
            is_same = may_differ or abs(found - wanted) <= _SAME_LOSS * max(1.0, abs(wanted))
            if not math.isfinite(found):
                is_same = not math.isfinite(wanted)
            if not is_same:
                return f"changes {what}: {wanted:.6g} to {found:.6g}"
        return ""

    def _beyond_its_kin(self, best: Finding) -> Finding:
        """Another option of the same kind was kept before: this one takes its place."""
        for number, kin in enumerate(self._findings):
            if kin.name == best.name and kin.is_kept:
                self._findings[number] = replace(kin, is_kept=False, reason=f"{best.what} is more")
                gains = [getattr(best, name) * kin.gain for name in ("gain", "low", "high")]
                best = replace(best, gain=gains[0], low=gains[1], high=gains[2])
        return best

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
                        reason="of one cached batch: it keeps up", is_apart=True)
            )  # fmt: skip
            return speed
        hint = _NONE_TRIED * (not self._subject.may_load_elsewhere)
        self._findings.append(
            Finding(name="loader", what="one cached batch", gain=ceiling, low=low, high=high,
                    reason=f"so much the loader takes{hint}", is_apart=True)
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


def _fitted(
    subject: TrialSubject, speed: Speed, candidates: Sequence[Candidate]
) -> tuple[TrialSubject, float]:
    """The subject with so much of its batch that a step is not too slow to be measured often.

    Returns:
        It, and the seconds that a step takes a sample.
    """
    few = _cut(subject, min(subject.num_samples, max(2, subject.num_samples // 16)))
    arm = Arm(few, speed, candidates, is_fed=False)
    each_s = arm.block_s(1) / few.num_samples
    arm.close()
    if each_s * subject.num_samples <= _STEP_S:
        return subject, each_s
    num_samples = int(_STEP_S / each_s)
    return _cut(subject, max(few.num_samples, num_samples)), each_s


def _cut(subject: TrialSubject, num_samples: int) -> TrialSubject:
    whole = subject.num_samples

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:num_samples] if tensor.ndim and len(tensor) == whole else tensor

    sizes = subject.objects.sizes | {num_samples}
    return replace(
        subject,
        batch=change_tensors(cut, subject.batch),
        num_samples=num_samples,
        feed=subject.feed if num_samples == whole else None,
        objects=replace(subject.objects, sizes=frozenset(sizes)),
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:120]
