"""Calls that all members make together: an evaluation they share, a sum over workers.

    Count -> Range -> Counted -> Range -> ... -> CountTotals        SumValues -> Summed

When a member dies, another evaluates its range and nobody waits for its sum. Each position is
counted once, and totals are summed in the order of positions, so they do not depend on who was
faster.

Once the run is stopped, a member hears so at a push or in a step that is cancelled, runs the rest
of its loop's body, and leaves the loop. A sum waits for the members that can still come to it:

    stage      the member's last message    its sum waits for
    IN_LOOP    (none of these)              members in IN_LOOP
    AT_END     LoopLeft                     members in IN_LOOP and AT_END
    BEHIND     OutOfLoop                    all members

A stage waits only for itself and earlier ones, and the stop, the rest of a body or a death moves
each member on, so no sums wait for each other. Between peers a member whose step is cancelled waits
until all have left the round, and a member in a sum before its step leaves it only at that step: so
no sum waits for a member that has left its round.

All sums of one answer are of one stage and get the same total. In IN_LOOP and BEHIND they are the
same call in the script. In AT_END a member whose step was cancelled skips the rest of the block: of
two sums in one body, one in the block after the step and one after the block, its second is then
added to the others' first, in this last batch only. Above 300 lines, since evaluations and sums
wait for the same members. This module must not know pushes or epochs.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum

from ..errors import ConfigError
from ..exchange.evaluation import ranges_of
from ..wire.messages import (
    AwaitsMain,
    Count,
    Counted,
    CountTotals,
    Range,
    Summed,
    SumValues,
    Totals,
)
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


class _Stage(IntEnum):
    """Where a member is in its epoch's loop, once the run is stopped."""

    IN_LOOP = 0
    AT_END = 1
    """It has heard the end, and runs the rest of the loop's body."""
    BEHIND = 2


class Calls:
    """The calls in progress.

    Args:
        evaluated: called with the totals of an evaluation.
        has_left_peers: whether a member left its round between peers, and waits until all have.

    Attributes:
        are_inside: whether members have summed inside an epoch, in their loops.
    """

    are_inside = False

    def __init__(
        self,
        run: RunState,
        evaluated: Callable[[Totals], None],
        has_left_peers: Callable[[int], bool],
    ) -> None:
        self._run = run
        self._evaluated = evaluated
        self._has_left_peers = has_left_peers
        self._shared: EvaluationBook | None = None
        """The evaluation that members share."""
        self._first_count: Count | None = None
        self._sums: dict[int, tuple[float, ...]] = {}
        self._alone: dict[int, EvaluationBook] = {}
        """Evaluations of newcomers, which the others do without them."""
        self.in_once: set[int] = set()
        """Members that wait for the main one in ``pace.once()``."""
        self._is_stopped = False
        self._heard_end: dict[int, int] = {}
        self._out_of_loop: dict[int, int] = {}
        """Per member: the last epoch whose end it has heard, and whose loop it has left."""

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
        num_own = len(self._sums[member])
        for other in self._summing(self._stage(member)):
            if (num_other := len(self._sums[other])) != num_own:
                seat, other_seat = (self._run.roster[number].seat for number in (member, other))
                raise ConfigError(
                    f"pace.sum() was given {num_own} numbers in worker {seat} and {num_other} in "
                    f"worker {other_seat}: give it a tensor of the same shape in every worker"
                )

    def stopped(self) -> None:
        """The run is stopped: from now on members leave their loops one by one."""
        self._is_stopped = True
        self._close_sums()

    def left_peers(self) -> None:
        """A member left its round between peers; if the run ends, its step was cancelled."""
        if self._run.ending:
            self._close_sums()

    def heard_end(self, member: int) -> None:
        """A member has heard that its epoch or the run is over; its loop's body may still run."""
        self._heard_end[member] = self._run.coordinator.epoch
        if self._is_stopped:
            self._close_sums()

    def out_of_loop(self, member: int) -> None:
        """A member's script has left its loop: once the run is stopped no sum there waits for it.

        Its next sum is a call after the loop, and another one.
        """
        self._out_of_loop[member] = self._run.coordinator.epoch
        if self._is_stopped:
            self._close_sums()

    def left(self, member: int) -> None:
        """A member is gone: others evaluate its ranges, and nobody waits for its sum."""
        self._alone.pop(member, None)
        self.in_once.discard(member)
        if self._shared is not None:
            self._shared.left(member)
            self._close_evaluation()
        self._close_sums()

    def awaits_main(self, member: int, message: AwaitsMain) -> None:
        """A member waits in ``pace.once()``, or no longer."""
        if message.is_waiting:
            self.in_once.add(member)
        else:
            self.in_once.discard(member)

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
        for stage in _Stage:
            group = self._summing(stage)
            if group and self._awaited(stage) <= set(group):
                self._answer_sum(group)

    def _awaited(self, stage: _Stage) -> set[int]:
        """The members that can still come to a sum at this stage."""
        return {
            number
            for number in self._run.crew
            if self._stage(number) <= stage
            and not (self._run.ending and self._has_left_peers(number))
        }

    def _answer_sum(self, group: Sequence[int]) -> None:
        columns = zip(*(self._sums.pop(number) for number in group), strict=True)
        total = tuple(sum(column) for column in columns)
        for number in group:
            self._run.dispatch.tell(number, Summed(total))

    def _summing(self, stage: _Stage) -> list[int]:
        """The members that wait in a sum at this stage, in member order."""
        return [number for number in sorted(self._sums) if self._stage(number) == stage]

    def _stage(self, member: int) -> _Stage:
        """Where a member is in its loop; until the run is stopped all count as being in it."""
        epoch = self._run.coordinator.epoch
        if not self._is_stopped:
            return _Stage.IN_LOOP
        has_joined = self._run.roster[member].has_joined
        if not has_joined or self._out_of_loop.get(member) == epoch:
            return _Stage.BEHIND
        return _Stage.AT_END if self._heard_end.get(member) == epoch else _Stage.IN_LOOP
