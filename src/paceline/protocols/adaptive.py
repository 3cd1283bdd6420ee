"""adaptive: k-async whose K grows as the loss falls, by the times that the run measures.

    worker 0  --step|--step--|--step--....|        K = 1 at first: cheap, stale, noisy updates;
    worker 1  --step----|--step--.....----|        later 2, 3, ... P, which is full-sync: costly and
    worker 2  --step-----------|--step----|        exact. No work is cancelled: all is measured

    K_t = argmin over K of  F_t T(K) + 2 F_0 T(1) / K      T(K): time of an update of k-async:K

F_t is the moving average of the training loss and F_0 its start. The first term is what an update
of K pushes costs in time, which weighs more the more there is to gain; the second is the noise that
it leaves. T(K) is found by simulating k-async with the live workers' last measured steps, so it
holds for any distribution, even if workers differ. For exponential times, where T(K) =
E[X_{K:P}], this is the paper's K^2/(P - K) = 2 F_0/(P F_t); for constant ones K = sqrt(2 F_0/F_t).
With the 2, K = 1 and K = 2 cost the same at the start, so the stalest updates end as soon as the
loss falls; without it a run keeps them for long, and its time to a loss varies twice as much from
seed to seed (results/adaptive.md).

K pushes are an update, so its samples grow with K: give --mini-batch-size.

Source: S. Dutta, J. Wang, G. Joshi, "Slow and Stale Gradients Can Win the Race" (AdaSync), arXiv
2003.10579, section on adaptive synchronicity. Changed: T(K) comes from the measured steps instead
of the exponential distribution, and the constant from T(1) instead of a given K_0.
"""

import math
from heapq import heapify, heappop, heappush
from typing import Any

from ..events import Decision, Exhausted, Fact, Left, Pushed
from ..fields import count, real
from .base import Gathering

_MOST_TIMES = 16
"""Steps of each member that are kept: enough for a mean, few enough to follow a change."""
_FEWEST_TIMES = 2
_CHOICE_ROUNDS = 4
"""Pushes of each worker between two choices of K, and simulated for each K."""
_NOISE = 2.0
"""The cost of a one-push update's noise, relative to its time, while F_t is F_0."""
_MOST_CHOICES = 16
"""Values of K that are simulated at a choice; with more workers, those around the last."""
_LEAST = 1e-6
"""The least ratio: below it a loss counts as zero, or is negative and no measure."""


class LossProgress:
    """How far the training loss has fallen since the run began: F_t/F_0.

    F_0 is the mean loss of the first pushes and F_t a moving average over about as many, which
    begins at F_0. Losses that are not finite, or unknown (a simulation of time alone), are
    ignored. It must not know what is decided from it.

    Args:
        num_pushes: the window of the mean and of the moving average.
    """

    __slots__ = ("_first", "_mean", "_num_heard", "_num_pushes")

    def __init__(self, num_pushes: int) -> None:
        self._num_pushes = num_pushes
        self._num_heard = 0
        self._first = 0.0  # F_0, so far
        self._mean = 0.0  # F_t

    def hear(self, loss: float) -> None:
        """Include the loss of a push."""
        if not math.isfinite(loss):
            return
        self._num_heard += 1
        if self._num_heard <= self._num_pushes:
            self._first += (loss - self._first) / self._num_heard
            self._mean = self._first
        else:
            self._mean += (loss - self._mean) / self._num_pushes

    @property
    def ratio(self) -> float:
        """F_t/F_0, above 0 and at most 1: a loss that grew counts as unchanged."""
        if self._num_heard < self._num_pushes or self._first <= 0.0:
            return 1.0
        return min(1.0, max(_LEAST, self._mean / self._first))

    def state(self) -> list[float]:
        """Return its state for JSON."""
        return [self._num_heard, self._first, self._mean]

    def load(self, state: list[Any]) -> None:
        """Restore what `state()` returned."""
        num_heard, first, mean = state
        self._num_heard, self._first, self._mean = count(num_heard), real(first), real(mean)


class Adaptive(Gathering):
    """Gather the pushes of K members; apply; choose K; release those."""

    name = "adaptive"
    summary = "k-async whose K grows from 1 as the loss falls, by the times it measures"
    has_stale_pushes = True
    is_adaptive = watches_loss = True
    learned = ("num_pushes", "progress")

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers, num_pushes=1)
        self._progress = LossProgress(4 * num_workers)
        self._begun_s: dict[int, float] = {}  # by working member, if known
        self._times_s: dict[int, list[float]] = {}  # by live member, the newest last
        self._num_since = 0  # pushes since K was chosen

    def react(self, fact: Fact) -> list[Decision]:
        if isinstance(fact, Pushed):
            self._hear(fact)
        elif isinstance(fact, Left):
            self._times_s.pop(fact.member, None)
            self._begun_s.pop(fact.member, None)
        before = self._working.copy()
        decisions = super().react(fact)
        if isinstance(fact, Exhausted):
            self._begun_s.clear()  # the start of the next epoch is not known here
        elif isinstance(fact, Pushed):
            before.discard(fact.ticket.member)
            self._begun_s.update(dict.fromkeys(self._working - before, fact.at_s))
        return decisions

    def note_dropped(self, fact: Pushed) -> None:
        """Measure the step like any other; the next one begins now."""
        self._measure(fact)
        self._begun_s[fact.ticket.member] = fact.at_s

    def _hear(self, fact: Pushed) -> None:
        self._progress.hear(fact.loss)
        self._num_since += 1
        self._measure(fact)

    def _measure(self, fact: Pushed) -> None:
        member = fact.ticket.member
        begun_s = self._begun_s.pop(member, None)
        if begun_s is not None:
            times_s = self._times_s.setdefault(member, [])
            times_s.append(fact.at_s - begun_s)
            del times_s[:-_MOST_TIMES]

    _after_push = Gathering._rest_and_fill

    def _after_update(self) -> list[Decision]:
        if self._num_since >= _CHOICE_ROUNDS * self.num_workers:
            self._num_since = 0
            self._choose()
        return self._release_idle()

    def _choose(self) -> None:
        """Choose the next K, once every live member has been measured."""
        num_live = len(self._idle) + len(self._working)
        rounds = min((len(times_s) for times_s in self._times_s.values()), default=0)
        if len(self._times_s) < num_live or rounds < _FEWEST_TIMES:
            self.num_pushes = min(self.num_pushes, num_live)
            return
        times_s = list(self._times_s.values())
        ratio, first_s = self._progress.ratio, _update_s(times_s, 1)
        low = max(1, min(self.num_pushes - _MOST_CHOICES // 2, num_live - _MOST_CHOICES + 1))
        choices = range(low, min(num_live, low + _MOST_CHOICES - 1) + 1)
        costs = {k: ratio * _update_s(times_s, k) + _NOISE * first_s / k for k in choices}
        self.num_pushes = min(costs, key=costs.__getitem__)

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "num_pushes": self.num_pushes,
            "progress": self._progress.state(),
            "begun_s": sorted(map(list, self._begun_s.items())),
            "times_s": [[member, list(self._times_s[member])] for member in sorted(self._times_s)],
            "num_since": self._num_since,
        }

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.num_pushes = max(1, min(count(state["num_pushes"]), self.num_workers))
        self._progress.load(state["progress"])
        self._begun_s = dict(state["begun_s"])
        self._times_s = {member: list(times_s) for member, times_s in state["times_s"]}
        self._num_since = state["num_since"]


def _update_s(times_s: list[list[float]], num_pushes: int) -> float:
    """Return the mean seconds of a k-async update if the steps took these times.

    Args:
        times_s: of each member's steps, used in a cycle.
    """
    ends = [(times[0], member) for member, times in enumerate(times_s)]
    heapify(ends)
    done, idle, now_s = [0] * len(times_s), list[int](), 0.0
    num_updates = 0
    for _ in range(max(num_pushes, _CHOICE_ROUNDS * len(times_s))):
        now_s, member = heappop(ends)
        done[member] += 1
        idle.append(member)
        if len(idle) == num_pushes:
            num_updates += 1
            last_s = now_s
            for i in idle:
                times = times_s[i]
                heappush(ends, (now_s + times[done[i] % len(times)], i))
            idle.clear()
    return last_s / num_updates
