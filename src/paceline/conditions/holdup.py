"""The delay that ``--delay`` and ``--slow`` ask for, step by step, on one live worker.

    seconds a step computed -> seconds to hold it up

It must not know what waits, nor that a wait may be cut short.
"""

import random
from dataclasses import dataclass

from ..context import Context
from .delays import Delay, parse_delays, parse_slowness
from .phases import PhasePace


@dataclass(slots=True, kw_only=True)
class Holdup:
    """How one worker is made slow.

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
    def of(cls, context: Context, seat: int) -> "Holdup":
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
        """How long to hold up, from ``now_s`` on, a step that began at ``begun_s``; draws once."""
        delay_s = 0.0 if self.delay is None else self.delay.sample(self.rng)
        work_s = (now_s - begun_s + delay_s) * self.factor
        if self.pace is None:
            return work_s - (now_s - begun_s)
        if self._zero_s is None:
            self._zero_s = begun_s
        start_s = begun_s - self._zero_s
        return self.pace.finish_s(start_s, work_s) - (now_s - self._zero_s)
