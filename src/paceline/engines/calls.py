"""Calls that all members make together: an evaluation they share, a sum over workers.

    Count -> Range -> Counted -> Range -> ... -> CountTotals        SumValues -> Summed

A member that dies takes nothing along: its range goes to another, its sum is not waited for.
This module must not know pushes or epochs.
"""

from collections.abc import Callable

from ..errors import ConfigError
from ..wire.messages import Count, Counted, CountTotals, Range, Summed, SumValues, Totals
from .census import CensusBook
from .run import Run


class Calls:
    """The calls under way.

    Args:
        evaluated: called with the totals of an evaluation.
    """

    def __init__(self, run: Run, evaluated: Callable[[Totals], None]) -> None:
        self._run = run
        self._evaluated = evaluated
        self._census: CensusBook | None = None
        self._asked: Count | None = None
        self._sums: dict[int, tuple[float, ...]] = {}
        self._alone: dict[int, CensusBook] = {}
        """Of newcomers, before their first epoch: the others have done the same without them."""

    def count(self, member: int, message: Count) -> None:
        shape = message[:3]
        if not self._run.roster[member].has_arrived:
            self._alone[member] = CensusBook(*shape)
            self._next_range_alone(member)
            return
        if self._census is None:
            seat_of = lambda one: self._run.roster[one].seat  # noqa: E731
            self._census, self._asked = CensusBook(*shape, seat_of=seat_of), message
        first = self._census.num_samples
        if message.num_samples != first:
            raise ConfigError(
                f"workers evaluate different data: {first} and {message.num_samples} samples"
            )
        if self._asked != message:
            raise ConfigError(
                "workers evaluate different samples or batches: the loader's sampler has random "
                "numbers of its own, or lists what has no order; let it draw from torch, random or "
                "numpy.random themselves, which are seeded alike for an evaluation"
            )
        self._next_range(member)

    def counted(self, member: int, message: Counted) -> None:
        if member in self._alone:
            self._alone[member].counted(member, message.start, message.totals)
            self._next_range_alone(member)
            return
        assert self._census is not None
        self._census.counted(member, message.start, message.totals)
        self._next_range(member)

    def sum(self, member: int, message: SumValues) -> None:
        if not self._run.roster[member].has_arrived:
            self._run.engine.tell(member, Summed(message.values))
            return
        self._sums[member] = message.values
        self._close_sums()

    def left(self, member: int) -> None:
        """A member is gone: others do its range, nobody waits for its sum."""
        self._alone.pop(member, None)
        if self._census is not None:
            self._census.left(member)
            self._close_census()
        self._close_sums()

    def is_waiting(self, member: int) -> bool:
        """Whether this member has done its part and waits for others."""
        in_census = self._census is not None and member in self._census.waiting
        return in_census or member in self._sums

    def _next_range_alone(self, member: int) -> None:
        book, tell = self._alone[member], self._run.engine.tell
        one = book.take(member)
        tell(member, Range(*(one or ())))
        if one is None:
            tell(member, CountTotals(self._alone.pop(member).totals()))

    def _next_range(self, member: int) -> None:
        census = self._census
        assert census is not None
        one = census.take(member)
        if one is not None:
            self._run.engine.tell(member, Range(*one))
            return
        census.waiting.append(member)
        self._close_census()

    def _close_census(self) -> None:
        census, tell = self._census, self._run.engine.tell
        if census is None:
            return
        while census.waiting and (one := census.take(census.waiting[0])) is not None:
            tell(census.waiting.pop(0), Range(*one))
        if not census.is_complete or not set(self._run.crew) <= set(census.waiting):
            return
        totals = census.totals()
        self._census = None
        self._evaluated(totals)  # where this ends the run, all hear so before they go on
        for number in census.waiting:
            tell(number, Range())
            tell(number, CountTotals(totals))

    def _close_sums(self) -> None:
        if self._sums and all(number in self._sums for number in self._run.crew):
            columns = zip(*(self._sums[number] for number in sorted(self._sums)), strict=True)
            total = tuple(sum(column) for column in columns)
            waiting = sorted(self._sums)
            self._sums.clear()
            for number in waiting:
                self._run.engine.tell(number, Summed(total))
