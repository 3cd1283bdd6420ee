"""Workers that are slow: always, in phases that come and go, and what one live worker waits for it.

    always  1=5x            5 times as long for each step
    phases  1=5x@60s/10s    5 times as long for 10 s about every 60 s

    speed   1    ------.        .-----------.     .---      two states, Markov: how long each lasts
            1/F        `--------'           `-----'         is exponential and remembers nothing

A step that takes X at full speed advances F times slower inside a slow phase, also when the phase
begins in its middle. Over a long time a worker is at the pace 1 - q + q/F, with q the share of
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
    """How many times longer each worker that is named takes: ``["1=5x"]`` -> ``{1: 5.0}``.

    Raises:
        ConfigError: not of this form, below 1, for no worker of the run, or given twice.
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
    """Slow phases: ``["1=5x@60s/10s"]``: worker 1 is 5 times as slow for 10 s about every 60 s.

    ``*=`` is for every worker, each with phases of its own.

    Raises:
        ConfigError: as for `parse_slow`, or a phase that takes no time.
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
    """Who is slow always, and who has slow phases: see `parse_slow` and `parse_phases`."""
    always = [text for text in values if "@" not in text]
    return parse_slow(always, num_workers), parse_phases(
        [text for text in values if "@" in text], num_workers
    )


def _factor(text: str, value: str) -> float:
    factor = float(text)
    if not 1 <= factor < math.inf:
        raise ConfigError(
            f"a slow factor must be >= 1 and finite, got {text} in {value!r}; to make one "
            f"worker the faster one, slow down the others"
        )
    return factor


@dataclass(slots=True, kw_only=True)
class InjectedDelay:
    """How one live worker is made slow, as ``--delay`` and ``--slow`` ask for.

    Args:
        factor: how many times longer its steps take, always.
        delay: what a step takes beside computing, before the factor.
        pace: its slow phases; their clock begins with its first step.
        rng: what delays are drawn from.
        num_steps: mini-batches a ticket.
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
        """Of the worker at ``seat``; its draws are those of `Conditions.finisher`.

        Raises:
            ConfigError: ``--delay`` or ``--slow`` is nonsense.
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
        """This ticket's draws are next: those of tickets that were called off too early to need
        them are passed over, so ticket n has the n-th draw here and in virtual time."""
        if self.delay is not None:
            for _ in range((serial - self._next_serial) * self.num_steps):
                self.delay.sample(self.rng)
        self._next_serial = max(self._next_serial, serial + 1)

    def seconds(self, begun_s: float, now_s: float) -> float:
        """How long a step waits, from ``now_s`` on, that began at ``begun_s``; draws once."""
        delay_s = 0.0 if self.delay is None else self.delay.sample(self.rng)
        work_s = (now_s - begun_s + delay_s) * self.factor
        if self.pace is None:
            return work_s - (now_s - begun_s)
        if self._zero_s is None:
            self._zero_s = begun_s
        start_s = begun_s - self._zero_s
        return self.pace.finish_s(start_s, work_s) - (now_s - self._zero_s)
