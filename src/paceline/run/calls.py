"""Calls that all members make together: an evaluation they share, a sum over workers.

    Count -> Range -> Counted -> Range -> ... -> CountTotals        SumValues -> Summed

When a member dies, another evaluates its range and nobody waits for its sum. Each position is
counted once, and totals are summed in the order of positions, so they do not depend on who was
faster. Once the run is stopped, members leave their loops one by one, and a sum inside the loop
waits only for members that are still in theirs. This module must not know pushes or epochs.
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
        num_samples: the positions are 0..num_samples.
        batch_size: positions per range.
        ends: where ranges end, if they are not all of one size.
        seat_of: member -> worker number, for messages.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        ends: Sequence[int] | None = None,
        *,
        seat_of: Callable[[int], int] = int,
    ) -> None:
        self.num_samples = num_samples
        self._num_ahead: dict[int, int] = {}
        self._seat_of = seat_of
        self._free = deque(ranges_of(num_samples, batch_size, ends))
        self._held: dict[int, list[tuple[int, int]]] = {}
        self._counted: dict[int, Totals] = {}
        self._names: dict[int, set[frozenset[str]]] = {}
        """Per member: the names of the metrics of each of its ranges."""
        self._num_ranges = len(self._free)
        self.waiting: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self._counted) == self._num_ranges

    def enter(self, member: int, num_ahead: int) -> None:
        """A member begins: it holds up to ``num_ahead`` ranges beside the one it evaluates."""
        self._num_ahead[member] = num_ahead

    def take(self, member: int) -> list[tuple[int, int]]:
        """The ranges that ``member`` holds from now on, in order; empty if none is left for it."""
        held = self._held.setdefault(member, [])
        while self._free and len(held) <= self._num_ahead.get(member, 0):
            held.append(self._free.popleft())
        return held

    def counted(self, member: int, start: int, totals: Totals) -> None:
        """A range is done.

        Raises:
            ConfigError: members report different metrics, so totals would cover part of the data.
        """
        held = self._held.get(member, [])
        self._held[member] = [bounds for bounds in held if bounds[0] != start]
        self._counted[start] = totals
        self._names.setdefault(member, set()).add(frozenset(totals))
        self._refuse_other_names(member)

    def _refuse_other_names(self, member: int) -> None:
        """Names may depend on the data (one per class): then they also differ within a member."""
        if len(self._names[member]) > 1:
            return
        (own_names,) = self._names[member]
        for other, name_sets in self._names.items():
            if len(name_sets) == 1 and own_names not in name_sets:
                (other_names,) = name_sets
                raise ConfigError(
                    f"workers report different metrics: {_listed(other_names - own_names)} in "
                    f"worker {self._seat_of(other)}, {_listed(own_names - other_names)} in worker "
                    f"{self._seat_of(member)}; totals would cover only part of the data: return "
                    "the same names in every worker, (0.0, 0) where there is nothing to count"
                )

    def left(self, member: int) -> None:
        """A member died: the ranges that it held are free again."""
        self._free.extendleft(reversed(self._held.pop(member, [])))
        if member in self.waiting:
            self.waiting.remove(member)

    def totals(self) -> Totals:
        sums: Totals = {}
        for start in sorted(self._counted):
            for name, (value, count) in self._counted[start].items():
                sum_before, count_before = sums.get(name, (0.0, 0.0))
                sums[name] = (sum_before + value, count_before + count)
        return sums


def _range_message(ranges: Sequence[tuple[int, int]]) -> Range:
    return Range(*ranges[0], tuple(ranges[1:])) if ranges else Range()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing more"


class Calls:
    """The calls in progress.

    Args:
        evaluated: called with the totals of an evaluation.

    Attributes:
        are_inside: whether members have summed inside an epoch, in their loops.
    """

    are_inside = False

    def __init__(self, run: RunState, evaluated: Callable[[Totals], None]) -> None:
        self._run = run
        self._evaluated = evaluated
        self._shared: EvaluationBook | None = None
        """The evaluation that members share."""
        self._first_count: Count | None = None
        self._sums: dict[int, tuple[float, ...]] = {}
        self._alone: dict[int, EvaluationBook] = {}
        """Evaluations of newcomers, which the others do without them."""
        self._is_stopped = False
        self._left_epoch: dict[int, int] = {}
        """Per member: the epoch whose loop it left last."""

    def count(self, member: int, message: Count) -> None:
        shape = message[:3]
        if self._is_alone(member):
            self._alone[member] = EvaluationBook(*shape)
            self._alone[member].enter(member, message.ahead)
            self._next_range_alone(member)
            return
        if self._shared is None:
            roster = self._run.roster
            self._first_count = message._replace(ahead=0)
            self._shared = EvaluationBook(*shape, seat_of=lambda number: roster[number].seat)
        num_samples = self._shared.num_samples
        if message.num_samples != num_samples:
            raise ConfigError(
                f"workers evaluate different data: {num_samples} and {message.num_samples} samples"
            )
        if self._first_count is not None and self._first_count.weights != message.weights:
            raise ConfigError(
                "workers evaluate different weights: the script changed them in one worker and "
                "not, or differently, in another; before the first epoch and after "
                "pace.publish(model), all workers get the main worker's weights when the next "
                "epoch begins: make the same change in every worker, or evaluate before the "
                "change or after that epoch"
            )
        if self._first_count != message._replace(ahead=0):  # which may differ
            raise ConfigError(
                "workers evaluate different samples or batches: the loader's sampler has its own "
                "random generator, or iterates over something unordered; let it draw from the "
                "global generators of torch, random or numpy.random, which are seeded alike for "
                "an evaluation"
            )
        self._shared.enter(member, message.ahead)
        self._next_range(member)

    def counted(self, member: int, message: Counted) -> None:
        if member in self._alone:
            self._alone[member].counted(member, message.start, message.totals)
            self._next_range_alone(member)
            return
        assert self._shared is not None
        self._shared.counted(member, message.start, message.totals)
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
        for other in self._summing(is_inside=self._is_inside(member)):
            if (num_other := len(self._sums[other])) != own:
                seat, other_seat = (self._run.roster[one].seat for one in (member, other))
                raise ConfigError(
                    f"pace.sum() was given {own} numbers in worker {seat} and {num_other} in "
                    f"worker {other_seat}: give it a tensor of the same shape in every worker"
                )

    def stopped(self) -> None:
        """The run is stopped: from now on members leave their loops one by one."""
        self._is_stopped = True
        self._close_sums()

    def left_loop(self, member: int) -> None:
        """A member has left its loop; once the run is stopped no sum inside the loop waits for it.

        A sum that this member comes to behind its loop is another one.
        """
        self._left_epoch[member] = self._run.coordinator.epoch
        if self._is_stopped:
            self._close_sums()

    def left(self, member: int) -> None:
        """A member is gone: others evaluate its ranges, and nobody waits for its sum."""
        self._alone.pop(member, None)
        if self._shared is not None:
            self._shared.left(member)
            self._close_evaluation()
        self._close_sums()

    def is_waiting(self, member: int) -> bool:
        """Whether this member has done its part of a call and waits for others."""
        return member in self.waiting()

    @property
    def summing(self) -> Collection[int]:
        """Members that wait for the sums of others."""
        return self._sums.keys()

    def waiting(self) -> dict[int, str]:
        """Members that have done their part and wait for the others -> what each is doing."""
        evaluating = [] if self._shared is None else self._shared.waiting
        in_evaluate = dict.fromkeys(evaluating, "waits in pace.evaluate()")
        return in_evaluate | dict.fromkeys(self._sums, "waits in pace.sum()")

    def _is_alone(self, member: int) -> bool:
        """Whether a newcomer is before its first epoch, or the run stopped before that opened."""
        return not self._run.roster[member].has_arrived or member not in self._run.crew

    def _next_range_alone(self, member: int) -> None:
        book, tell = self._alone[member], self._run.dispatch.tell
        ranges = book.take(member)
        tell(member, _range_message(ranges))
        if not ranges:
            tell(member, CountTotals(self._alone.pop(member).totals()))

    def _next_range(self, member: int) -> None:
        assert self._shared is not None
        if ranges := self._shared.take(member):
            self._run.dispatch.tell(member, _range_message(ranges))
            return
        self._shared.waiting.append(member)
        self._close_evaluation()

    def _close_evaluation(self) -> None:
        book, tell = self._shared, self._run.dispatch.tell
        if book is None:
            return
        while book.waiting and (ranges := book.take(book.waiting[0])):
            tell(book.waiting.pop(0), _range_message(ranges))
        if not book.is_complete or not set(self._run.crew) <= set(book.waiting):
            return
        totals = book.totals()
        self._shared = None
        self._evaluated(totals)  # if this ends the run, all members hear so before they go on
        for number in book.waiting:
            tell(number, Range())
            tell(number, CountTotals(totals))

    def _close_sums(self) -> None:
        """Answer each sum that no member is missing from."""
        if not self._sums:
            return
        crew = self._run.crew
        for is_inside in (True, False):
            group = self._summing(is_inside=is_inside)
            # Behind the loop all are awaited: those who are still in it come there later.
            awaited = [one for one in crew if self._is_inside(one)] if is_inside else crew
            if group and set(awaited) <= set(group):
                self._answer_sum(group)

    def _answer_sum(self, group: Sequence[int]) -> None:
        columns = zip(*(self._sums.pop(number) for number in group), strict=True)
        total = tuple(sum(column) for column in columns)
        for number in group:
            self._run.dispatch.tell(number, Summed(total))

    def _summing(self, *, is_inside: bool) -> list[int]:
        """The members that wait in a sum inside their loops, or behind them, in member order."""
        return [one for one in sorted(self._sums) if self._is_inside(one) == is_inside]

    def _is_inside(self, member: int) -> bool:
        """Whether a member is in its loop; until the run is stopped all count as being in one."""
        if not self._is_stopped:
            return True
        has_left = self._left_epoch.get(member) == self._run.coordinator.epoch
        return self._run.roster[member].has_joined and not has_left
