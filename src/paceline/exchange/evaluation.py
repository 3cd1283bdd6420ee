"""Who evaluates which part of a data set: one member alone, or all members, range by range.

This module must not know what is counted.
"""

import abc
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..wire.messages import Counted, CountTotals, Range, Totals

if TYPE_CHECKING:  # a worker alone has neither
    from ..wire.channel import Channel
    from .inbox import Inbox


def ranges_of(
    num_samples: int, batch_size: int, ends: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return each batch's positions, ``[start, stop)``; ``ends``: of the user's own batches."""
    stops = ends or [*range(batch_size, num_samples, batch_size), num_samples]
    return [(a, b) for a, b in zip([0, *stops], stops, strict=False) if a < b]


class EvaluationRanges(abc.ABC):
    """An evaluation that members share: each sample once, redone if a member dies."""

    @abc.abstractmethod
    def next(self) -> tuple[int, int] | None:
        """Return the next range of positions to evaluate, or None when all are taken."""

    @abc.abstractmethod
    def ahead(self) -> Iterable[tuple[int, int]]:
        """Return the ranges that ``next`` returns after that one, as far as they are known."""

    @abc.abstractmethod
    def report(self, totals: Totals) -> None:
        """Report the totals of the range that ``next`` returned."""

    @abc.abstractmethod
    def totals(self) -> Totals:
        """Return the totals over all samples, the same in all members."""


class LocalRanges(EvaluationRanges):
    """An evaluation by one member alone."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._ranges = deque(ranges)
        self._totals: Totals = {}

    def next(self) -> tuple[int, int] | None:
        return self._ranges.popleft() if self._ranges else None

    def ahead(self) -> Iterable[tuple[int, int]]:
        return self._ranges

    def report(self, totals: Totals) -> None:
        for name, (value, count) in totals.items():
            old = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = (old[0] + value, old[1] + count)

    def totals(self) -> Totals:
        return self._totals


class PartRanges(LocalRanges):
    """One member's share, known beforehand, of an evaluation that all members make together."""


class SharedRanges(EvaluationRanges):
    """An evaluation whose ranges come from the coordinator."""

    def __init__(self, channel: "Channel", mail: "Inbox") -> None:
        self._channel = channel
        self._mail = mail
        self._start = -1
        self._ahead: tuple[tuple[int, int], ...] = ()

    def next(self) -> tuple[int, int] | None:
        self._start, stop, self._ahead = self._mail.expect(Range)
        return None if self._start < 0 else (self._start, stop)

    def ahead(self) -> Iterable[tuple[int, int]]:
        return self._ahead

    def report(self, totals: Totals) -> None:
        self._channel.send(Counted(self._start, totals))

    def totals(self) -> Totals:
        return self._mail.expect(CountTotals).totals
