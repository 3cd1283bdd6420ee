"""The exchange of one worker in its own process: the user's optimizer on the user's parameters.

Nothing is copied, sent or written, and there are no leases: ``python train.py`` is the bare loop.
This module must not know stores or processes.
"""

import time
from collections.abc import Sequence

from ..stopping import StopRule, StopRules
from ..wire.messages import Totals
from .base import Exchange
from .evaluation import EvaluationRanges, LocalRanges, ranges_of


class SoloExchange(Exchange):
    """One worker, no coordinator: every step is its own update."""

    def __init__(self) -> None:
        self._version = 0
        self._skipped = 0
        self._is_stopped = False
        self.rules = StopRules()
        self.begun_s = time.perf_counter()

    @property
    def alone(self) -> "SoloExchange":
        return self

    def push(self) -> None:
        """Count a step of the optimizer."""
        self._version += 1

    def skip(self) -> None:
        """Like ``push``, for an update that changed nothing."""
        self._skipped += 1
        self._version += 1

    def superseded(self) -> None:
        raise AssertionError("one worker alone never cancels")

    def applied(self, version: int) -> int:
        return version - self._skipped

    def ask_to_stop(self) -> None:
        self._is_stopped = True

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    @property
    def version(self) -> int:
        return self._version

    def census(self, num_samples: int, batch_size: int) -> EvaluationRanges:
        return LocalRanges(ranges_of(num_samples, batch_size))

    def stop_when(self, rule: StopRule) -> None:
        self.rules.add(rule)

    def measured(self, totals: Totals) -> None:
        means = {name: value / count for name, (value, count) in totals.items() if count}
        if self.rules.hear(means):
            self._is_stopped = True

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]
