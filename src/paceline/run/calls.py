"""Calls that all members make together: an evaluation they share, a sum over workers.

    Count -> Range -> Counted -> Range -> ... -> CountTotals        SumValues -> Summed

A member that dies takes nothing along: its range goes to another, its sum is not waited for. Each
position is counted once, and totals are summed in the order of positions, so they do not depend on
who was faster. This module must not know pushes or epochs.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from ..errors import ConfigError
from ..exchange.evaluation import ranges_of
from ..wire.messages import Count, Counted, CountTotals, Range, Summed, SumValues, Totals
from .state import RunState


class EvaluationBook:
    """The ranges of one evaluation.

    Args:
        num_samples: positions 0..num_samples.
        batch_size: positions a range.
        ends: where ranges end that are not all of one size.
        num_ahead: ranges that a member has beside the one that it evaluates.
        seat_of: member -> the worker's number, for what is said.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        ends: Sequence[int] | None = None,
        *,
        num_ahead: int = 0,
        seat_of: Callable[[int], int] = int,
    ) -> None:
        self.num_samples = num_samples
        self._num_ahead = num_ahead
        self._seat_of = seat_of
        self._free = deque(ranges_of(num_samples, batch_size, ends))
        self._held: dict[int, list[tuple[int, int]]] = {}
        self._counted: dict[int, Totals] = {}
        self._names: dict[int, set[frozenset[str]]] = {}
        """Per member: what each of its ranges was measured by."""
        self._num_ranges = len(self._free)
        self.waiting: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self._counted) == self._num_ranges

    def take(self, member: int) -> list[tuple[int, int]]:
        """The ranges of ``member`` from now on, in their order; none when none is free."""
        held = self._held.setdefault(member, [])
        while self._free and len(held) <= self._num_ahead:
            held.append(self._free.popleft())
        return held

    def counted(self, member: int, start: int, totals: Totals) -> None:
        """A range is done.

        Raises:
            ConfigError: members measure by different names, so that totals would be of a part.
        """
        self._held[member] = [one for one in self._held.get(member, []) if one[0] != start]
        self._counted[start] = totals
        self._names.setdefault(member, set()).add(frozenset(totals))
        self._refuse_other_names(member)

    def _refuse_other_names(self, member: int) -> None:
        """Names may follow from the data (one a class): then they differ within a member, too."""
        if len(self._names[member]) > 1:
            return
        (own,) = self._names[member]
        for other, names in self._names.items():
            if len(names) == 1 and own not in names:
                (theirs,) = names
                raise ConfigError(
                    f"workers evaluate by different names: {_listed(theirs - own)} in worker "
                    f"{self._seat_of(other)}, {_listed(own - theirs)} in worker "
                    f"{self._seat_of(member)}; totals would be over a "
                    "part of the data: give the same names in every worker, (0.0, 0) where there "
                    "is nothing to count"
                )

    def left(self, member: int) -> None:
        """What a dead member held is free again."""
        self._free.extendleft(reversed(self._held.pop(member, [])))
        if member in self.waiting:
            self.waiting.remove(member)

    def totals(self) -> Totals:
        sums: Totals = {}
        for start in sorted(self._counted):
            for name, (value, count) in self._counted[start].items():
                old = sums.get(name, (0.0, 0.0))
                sums[name] = (old[0] + value, old[1] + count)
        return sums


def _told(ranges: Sequence[tuple[int, int]]) -> Range:
    return Range(*ranges[0], tuple(ranges[1:])) if ranges else Range()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing more"


class Calls:
    """The calls under way.

    Args:
        evaluated: called with the totals of an evaluation.

    Attributes:
        are_inside: whether members have summed inside an epoch, in their loops.
    """

    are_inside = False

    def __init__(self, run: RunState, evaluated: Callable[[Totals], None]) -> None:
        self._run = run
        self._evaluated = evaluated
        self._census: EvaluationBook | None = None
        self._asked: Count | None = None
        self._sums: dict[int, tuple[float, ...]] = {}
        self._alone: dict[int, EvaluationBook] = {}
        """Of those who are by themselves: the others do the same without them."""

    def count(self, member: int, message: Count) -> None:
        shape = message[:3]
        if self._is_alone(member):
            self._alone[member] = EvaluationBook(*shape, num_ahead=message.ahead)
            self._next_range_alone(member)
            return
        if self._census is None:
            roster = self._run.roster
            self._asked = message._replace(ahead=0)
            self._census = EvaluationBook(
                *shape, num_ahead=message.ahead, seat_of=lambda one: roster[one].seat
            )
        first = self._census.num_samples
        if message.num_samples != first:
            raise ConfigError(
                f"workers evaluate different data: {first} and {message.num_samples} samples"
            )
        if self._asked is not None and self._asked.weights != message.weights:
            raise ConfigError(
                "workers evaluate different weights: the script has changed them in one worker, "
                "and in another not, or otherwise; before the first epoch, and after "
                "pace.publish(model), all get the main worker's when the next epoch begins: make "
                "the same change in every worker, or evaluate before it or after that epoch"
            )
        if self._asked != message._replace(ahead=0):  # how far ahead is each worker's own affair
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
        if self._is_alone(member):
            self._run.dispatch.tell(member, Summed(message.values))
            return
        self.are_inside |= self._run.is_open
        self._sums[member] = message.values
        self._refuse_other_shape(member)
        self._close_sums()

    def _refuse_other_shape(self, member: int) -> None:
        """Raise ConfigError where another member sums more or fewer numbers than this one."""
        own = len(self._sums[member])
        for other, values in self._sums.items():
            if len(values) != own:
                seat, others = (self._run.roster[one].seat for one in (member, other))
                raise ConfigError(
                    f"pace.sum() was given {own} numbers in worker {seat} and {len(values)} in "
                    f"worker {others}: give it a tensor of the same shape in every worker"
                )

    def left(self, member: int) -> None:
        """A member is gone: others do its range, nobody waits for its sum."""
        self._alone.pop(member, None)
        if self._census is not None:
            self._census.left(member)
            self._close_census()
        self._close_sums()

    def is_waiting(self, member: int) -> bool:
        """Whether this member has done its part and waits for others."""
        return member in self.waiting()

    @property
    def summing(self) -> Collection[int]:
        """Members that wait for the sums of others."""
        return self._sums.keys()

    def waiting(self) -> dict[int, str]:
        """Members that have done their part and wait for all others, with what they do."""
        census = [] if self._census is None else self._census.waiting
        evaluate = dict.fromkeys(census, "waits in pace.evaluate()")
        return evaluate | dict.fromkeys(self._sums, "waits in pace.sum()")

    def _is_alone(self, member: int) -> bool:
        """Of a newcomer: before its first epoch, or where the run stops before that one opens."""
        return not self._run.roster[member].has_arrived or member not in self._run.crew

    def _next_range_alone(self, member: int) -> None:
        book, tell = self._alone[member], self._run.dispatch.tell
        ranges = book.take(member)
        tell(member, _told(ranges))
        if not ranges:
            tell(member, CountTotals(self._alone.pop(member).totals()))

    def _next_range(self, member: int) -> None:
        census = self._census
        assert census is not None
        if ranges := census.take(member):
            self._run.dispatch.tell(member, _told(ranges))
            return
        census.waiting.append(member)
        self._close_census()

    def _close_census(self) -> None:
        census, tell = self._census, self._run.dispatch.tell
        if census is None:
            return
        while census.waiting and (ranges := census.take(census.waiting[0])):
            tell(census.waiting.pop(0), _told(ranges))
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
                self._run.dispatch.tell(number, Summed(total))
