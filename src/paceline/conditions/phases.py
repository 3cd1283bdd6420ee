"""Slow phases that come and go: a worker that is slow for a while, then fast again.

    speed   1    ------.        .-----------.     .---      two states, Markov: how long each lasts
            1/F        `--------'           `-----'         is exponential and remembers nothing

A step that takes X at full speed advances F times slower inside a slow phase, also when the phase
begins in its middle. Over a long time a worker is at the pace 1 - q + q/F, with q the share of
time that is slow. It must not know what a step is.

Source: a two-state Markov-modulated server; for why workers have such phases J. Dean and
L. A. Barroso, "The Tail at Scale", CACM 56(2), 2013.
"""

import random
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """``factor`` times as slow for ``slow_s`` seconds on average, every ``fast_s`` on average."""

    factor: float
    fast_s: float
    slow_s: float

    @property
    def pace(self) -> float:
        """Work done a second in the long run, 1 at full speed."""
        share = self.slow_s / (self.fast_s + self.slow_s)
        return 1.0 - share + share / self.factor


class PhasePace:
    """The phases of one worker, drawn as far as somebody has looked; it begins fast."""

    def __init__(self, phases: Phases, rng: random.Random) -> None:
        self._phases = phases
        self._rng = rng
        self._is_slow = False  # until the first of the changes
        self._changes_s: deque[float] = deque([rng.expovariate(1.0 / phases.fast_s)])

    def finish_s(self, start_s: float, work_s: float) -> float:
        """When a step is done that begins at ``start_s`` and takes ``work_s`` at full speed.

        ``start_s`` never goes back from one call to the next. It may lie before what the last one
        returned: that step was called off, and the phases are the same as if it had not been.
        """
        changes_s = self._changes_s
        while changes_s[0] <= start_s:
            self._look_ahead(2)
            changes_s.popleft()
            self._is_slow = not self._is_slow
        at_s, left_s, number = start_s, work_s, 0
        while True:
            slowness = 1.0 if self._is_slow == number % 2 else self._phases.factor
            room_s = (changes_s[number] - at_s) / slowness
            if left_s <= room_s:
                return at_s + left_s * slowness
            left_s -= room_s
            at_s = changes_s[number]
            number += 1
            self._look_ahead(number + 1)

    def _look_ahead(self, count: int) -> None:
        """Draw until ``count`` changes are known."""
        changes_s, phases = self._changes_s, self._phases
        while len(changes_s) < count:
            is_slow_after = self._is_slow == (len(changes_s) % 2 == 0)
            mean_s = phases.slow_s if is_slow_after else phases.fast_s
            changes_s.append(changes_s[-1] + self._rng.expovariate(1.0 / mean_s))
