"""Slow workers: always, or in phases that come and go, and the delays of one live worker.

    always  1=5x            5 times as long for each step
    phases  1=5x@60s/10s    5 times as long for 10 s about every 60 s

    speed   1    ------.        .-----------.     .---      two states, Markov: how long each lasts
            1/F        `--------'           `-----'         is exponential and memoryless

A step that takes X at full speed advances F times slower inside a slow phase, also if the phase
begins in its middle. In the long run a worker's pace is 1 - q + q/F, where q is the fraction of
time that is slow. On a live worker a delay is injected, step by step:

    seconds a step computed -> seconds to wait

It must not know what a step is, what waits, nor that a wait may be cut short.

Source: a two-state Markov-modulated server; for why workers have such phases J. Dean and
L. A. Barroso, "The Tail at Scale", CACM 56(2), 2013.
"""

import math
import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..context import Context
from ..errors import ConfigError
from .delays import NUMBER, Delay, parse_delays, parse_seconds, parse_worker, set_once


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """``factor`` times as slow for ``slow_s`` on average, after ``fast_s`` on average."""

    factor: float
    fast_s: float
    slow_s: float

    @property
    def pace(self) -> float:
        """Work per second in the long run, 1 at full speed."""
        share = self.slow_s / (self.fast_s + self.slow_s)
        return 1.0 - share + share / self.factor


class PhasePace:
    """The phases of one worker, drawn as far as they are needed; the first one is fast."""

    def __init__(self, phases: Phases, rng: random.Random) -> None:
        self._phases = phases
        self._rng = rng
        self._is_slow = False  # until the first change
        self._changes_s: deque[float] = deque([rng.expovariate(1.0 / phases.fast_s)])

    def finish_s(self, start_s: float, work_s: float) -> float:
        """Return when a step ends that begins at ``start_s`` and takes ``work_s`` at full speed.

        ``start_s`` never decreases from one call to the next. It may be before the last result:
        that step was cancelled, which does not change the phases.
        """
        changes_s = self._changes_s
        while changes_s[0] <= start_s:
            self._look_ahead(2)
            changes_s.popleft()
            self._is_slow = not self._is_slow
        at_s, remaining_s, index = start_s, work_s, 0
        while True:
            slowness = 1.0 if self._is_slow == index % 2 else self._phases.factor
            full_speed_s = (changes_s[index] - at_s) / slowness
            if remaining_s <= full_speed_s:
                return at_s + remaining_s * slowness
            remaining_s -= full_speed_s
            at_s = changes_s[index]
            index += 1
            self._look_ahead(index + 1)

    def _look_ahead(self, count: int) -> None:
        """Draw until ``count`` changes are known."""
        changes_s, phases = self._changes_s, self._phases
        while len(changes_s) < count:
            is_slow_after = self._is_slow == (len(changes_s) % 2 == 0)
            mean_s = phases.slow_s if is_slow_after else phases.fast_s
            changes_s.append(changes_s[-1] + self._rng.expovariate(1.0 / mean_s))


def parse_slow(values: Sequence[str], num_workers: int) -> dict[int, float]:
    """Return how many times longer each listed worker takes: ``["1=5x"]`` -> ``{1: 5.0}``.

    Raises:
        ConfigError: a value has another form, is below 1, names no worker of the run, or a worker
            that has one already.
    """
    factors: dict[int, float] = {}
    for value in values:
        match = re.fullmatch(rf"([^=]*)=({NUMBER})x?", value.replace(" ", "").lower())
        if match is None:
            raise ConfigError(
                f"slow must read WORKER=FACTORx, got {value!r}; 1=5x makes worker 1 take 5 times "
                f"as long"
            )
        factor = _factor(match[2], value)
        worker = parse_worker(match[1], value, "slow", num_workers)
        set_once(factors, worker, factor, value, "slow")
    return factors


def parse_phases(values: Sequence[str], num_workers: int) -> dict[int, Phases]:
    """Return the slow phases of each listed worker.

    ``["1=5x@60s/10s"]``: worker 1 is 5 times as slow for 10 s about every 60 s. ``*=`` is for
    every worker, each with phases of its own.

    Raises:
        ConfigError: as for `parse_slow`, or a phase of 0 s.
    """
    by_worker: dict[int, Phases] = {}
    for value in values:
        match = re.fullmatch(rf"([^=]*)=({NUMBER})x?@([^/]+)/(.+)", value.replace(" ", "").lower())
        if match is None:
            raise ConfigError(
                f"slow phases must read WORKER=FACTORx@FAST/SLOW, got {value!r}; 1=5x@60s/10s "
                "makes worker 1 take 5 times as long for 10 s about every 60 s"
            )
        fast_s, slow_s = (parse_seconds(match[i], value, "slow") for i in (3, 4))
        if not fast_s or not slow_s:
            raise ConfigError(f"slow {value!r}: both phases must be > 0 s long")
        phases = Phases(factor=_factor(match[2], value), fast_s=fast_s, slow_s=slow_s)
        workers: Sequence[int] = range(num_workers)
        if match[1] != "*":
            workers = [parse_worker(match[1], value, "slow", num_workers)]
        for worker in workers:
            set_once(by_worker, worker, phases, value, "slow")
    return by_worker


def parse_slowness(
    values: Sequence[str], num_workers: int
) -> tuple[dict[int, float], dict[int, Phases]]:
    """Return the results of `parse_slow` and `parse_phases`, each for the values of its form."""
    always = [text for text in values if "@" not in text]
    return parse_slow(always, num_workers), parse_phases(
        [text for text in values if "@" in text], num_workers
    )


def _factor(text: str, value: str) -> float:
    factor = float(text)
    if not 1 <= factor < math.inf:
        raise ConfigError(
            f"a slow factor must be >= 1 and finite, got {text} in {value!r}; to make one worker "
            "faster, slow down the others"
        )
    return factor


@dataclass(slots=True, kw_only=True)
class InjectedDelay:
    """The delays of one live worker under ``--delay`` and ``--slow``.

    Args:
        factor: how many times longer its steps take, always.
        delay: time of a step besides computing, before the factor.
        pace: its slow phases; their clock starts at its first step.
        rng: the generator that delays are drawn with.
        num_steps: mini-batches per ticket.
    """

    factor: float
    delay: Delay | None
    pace: PhasePace | None
    rng: random.Random
    num_steps: int = 1
    _next_serial: int = 0
    _zero_s: float | None = None

    @classmethod
    def of(cls, context: Context, seat: int) -> "InjectedDelay":
        """Return the delays of the worker at ``seat``, drawn as by `Conditions.finisher`.

        Raises:
            ConfigError: ``--delay`` or ``--slow`` is invalid.
        """
        factors, phases = parse_slowness(context.slow, context.workers)
        pace = None
        if seat in phases:
            pace = PhasePace(phases[seat], random.Random(f"{context.seed}/{seat}/phases"))
        return cls(
            factor=factors.get(seat, 1.0),
            delay=parse_delays(context.delay, context.workers)[seat],
            pace=pace,
            rng=random.Random(f"{context.seed}/{seat}"),
            num_steps=context.num_steps,
        )

    def catch_up(self, serial: int) -> None:
        """Skip the draws of tickets before this one that were cancelled before they needed them.

        So ticket n has the n-th draw, as it has in virtual time.
        """
        if self.delay is not None:
            for _ in range((serial - self._next_serial) * self.num_steps):
                self.delay.sample(self.rng)
        self._next_serial = max(self._next_serial, serial + 1)

    def seconds(self, begun_s: float, now_s: float) -> float:
        """Return how long a step that began at ``begun_s`` waits from ``now_s`` on; draws once."""
        delay_s = 0.0 if self.delay is None else self.delay.sample(self.rng)
        work_s = (now_s - begun_s + delay_s) * self.factor
        if self.pace is None:
            return work_s - (now_s - begun_s)
        if self._zero_s is None:
            self._zero_s = begun_s
        start_s = begun_s - self._zero_s
        return self.pace.finish_s(start_s, work_s) - (now_s - self._zero_s)
