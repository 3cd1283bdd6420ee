"""What a schedule takes between processes of one machine that share its cores, from few messages.

Between equals (cost.py) ranks do not disturb one another. Processes of one machine do: where there
are more of them than cores a round takes what all its messages take together, however short each
is, and the fewest messages win. So what is measured are whole rounds, each kind at some sizes:

    alone    0 -> 1, all others wait                        t_1(n)
    ring     r -> r + 1, all at the same time               t_r(n)     P messages
    fan      all -> 0, and 0 -> all                         t_f(n)     P - 1, all at one rank
    all      every rank -> every other one                  t_a(n)     P (P - 1)

A round of a schedule takes the longer of

    span     over the ranks: t_1 of its largest message, and (t_f - t_1) / (P - 2) for each other
    work     all messages: x(n) each, and t_r / P - x for each rank that takes part,
             x = (t_a - t_r) / (P (P - 2))                                  of two ranks x = t_r / 2

which gives back each kind that was measured. Between two sizes a time is on the straight line,
beyond the largest it goes on. Rounds follow one another; what a message adds is in it, so each
kind is measured for messages that are copied and for such that are added.

What it cannot know is when a process loses its core with a lock in its hand. Gloo's own thread then
asks the same socket again and again until its scheduler turn is over: of four processes on two
cores a round of 64 B takes 1.1 to 7 ms, a turn or several, beside 62 us of one alone (strace: 1,600
epoll_wait in 0.3 s for one message). So with more processes than cores crossings are by chance.

Source of span and work: R. Brent, "The parallel evaluation of general arithmetic expressions",
Journal of the ACM 21(2), 1974. Changed: both are measured, not counted.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from ..errors import ConfigError
from ..fields import count, real
from .base import Collective, LinkCost
from .transfers import Action, ChunkTransfer, Operation, Round, bounds

KINDS: Final = ("alone", "ring", "fan", "all")
"""Kinds of rounds, as drawn above; of two ranks the first two, which say all."""

Curve = tuple[tuple[int, float], ...]
"""Seconds at some sizes in bytes, from small to large."""


def kinds_of(num_ranks: int) -> tuple[str, ...]:
    """Those that so many ranks have."""
    return KINDS if num_ranks > 2 else KINDS[:2]


class RoundOfKind(Collective):
    """A schedule that is one kind of round: what is measured.

    A call is two rounds of ``alone`` and of ``fan``, there and back, and one of the others. A
    message is one of P chunks.
    """

    name = "round of a kind"
    summary = "one kind of round, for measuring"
    formula = "as measured"
    operations = (Operation.ALL_REDUCE,)

    def __init__(self, num_ranks: int, kind: str, action: Action) -> None:
        super().__init__(num_ranks)
        self.kind, self.action = kind, action

    @property
    def num_rounds(self) -> int:
        return 2 if self.kind in ("alone", "fan") else 1

    def num_ports(self, operation: Operation) -> int:
        return self.num_ranks - 1

    def _rounds(self, operation: Operation, root: int) -> Iterator[Round]:
        size, is_adding = self.num_ranks, self.action is Action.REDUCE
        if self.kind == "alone":
            yield self._round([(0, 1, 0)])
            yield self._round([(1, 0, 0)])
        elif self.kind == "ring":
            yield self._round([(rank, (rank + 1) % size, rank) for rank in range(size)])
        elif self.kind == "fan":
            yield self._round([(rank, 0, 0) for rank in range(1, size)])
            yield self._round([(0, rank, 0) for rank in range(1, size)])
        else:
            yield self._round([
                (one, other, other if is_adding else one)
                for one in range(size) for other in range(size) if one != other
            ])  # fmt: skip

    def _round(self, ends: Iterable[tuple[int, int, int]]) -> Round:
        return tuple(ChunkTransfer(one, other, (chunk,), self.action) for one, other, chunk in ends)

    def _seconds(self, operation: Operation, size_bytes: float, link: LinkCost) -> float:
        raise ConfigError(f"a {self.name} has no formula: it is measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """What rounds take between so many processes of one machine, as measured there.

    Args:
        rounds: seconds of a round by its kind and what becomes of a message, at sizes of a message.
        native_s: seconds of torch.distributed's own all-reduce, at sizes of the buffer; may be
            empty.
        beside_s: by collective, ``native`` among them, what a sum that is under way adds to a rank
            that computes meanwhile, what its thread costs with it; of native the least that was
            seen, of a schedule the most. May be empty.

    Raises:
        ConfigError: a kind is missing, or a time is none.
    """

    num_ranks: int
    rounds: Mapping[tuple[str, Action], Curve]
    native_s: Curve = ()
    beside_s: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = {(kind, action) for kind in kinds_of(self.num_ranks) for action in Action}
        if self.num_ranks < 2 or self.rounds.keys() != wanted:
            raise ConfigError(f"no rounds of {self.num_ranks} processes: kinds are missing")
        whole = [*self.rounds.values(), *self.beside_s.values()]
        for curve in (*whole, *([self.native_s] if self.native_s else [])):
            is_rising = all(one[0] < other[0] for one, other in pairwise(curve))
            if not curve or not is_rising or not all(n > 0 and 0 < s < 1e6 for n, s in curve):
                raise ConfigError("no times of rounds: sizes must rise, and times be positive")

    @classmethod
    def read(cls, values: Any) -> "HostCost":
        """What ``write`` gave.

        Raises:
            ValueError, TypeError, KeyError, ConfigError: it was something else.
        """
        rounds = {
            (str(kind), Action(action)): _curve(points) for kind, action, points in values["rounds"]
        }
        beside_s = {str(name): _curve(one) for name, one in dict.items(values.get("beside_s", {}))}
        return cls(
            num_ranks=count(values["num_ranks"]), rounds=rounds,
            native_s=_curve(values["native_s"]), beside_s=beside_s,
        )  # fmt: skip

    def write(self) -> dict[str, object]:
        """As JSON has it."""
        rounds = [[kind, action.value, curve] for (kind, action), curve in self.rounds.items()]
        return {
            "num_ranks": self.num_ranks, "rounds": rounds, "native_s": self.native_s,
            "beside_s": self.beside_s,
        }  # fmt: skip

    def seconds(
        self, collective: Collective, operation: Operation, size_bytes: int, root: int = 0
    ) -> float:
        """Seconds of an operation.

        Args:
            size_bytes: the whole buffer; of an all-to-all what one rank begins with.

        Raises:
            ConfigError: the collective is for another number of ranks, or has no such operation.
        """
        if collective.num_ranks != self.num_ranks:
            raise ConfigError(
                f"{collective} is for {collective.num_ranks} ranks; measured are {self.num_ranks}"
            )
        collective = collective.for_size(size_bytes)
        is_all_to_all = operation is Operation.ALL_TO_ALL
        total = self.num_ranks * size_bytes if is_all_to_all else size_bytes
        lengths = [b - a for a, b in bounds(total, collective.num_chunks(operation))]
        known: dict[object, float] = {}
        seconds = 0.0
        for transfers in collective.rounds(operation, root):
            messages = [(one, sum(lengths[chunk] for chunk in one.chunks)) for one in transfers]
            key = tuple((*one[:2], one.action, length) for one, length in messages)
            if key not in known:
                known[key] = self._round_s([pair for pair in messages if pair[1]])
            seconds += known[key]
        return seconds

    def native_reduce_s(self, size_bytes: int) -> float:
        """Seconds of torch.distributed's own all-reduce, where that was measured."""
        return at(self.native_s, size_bytes)

    def _round_s(self, messages: Sequence[tuple[ChunkTransfer, int]]) -> float:
        if not messages:
            return 0.0
        ends: dict[tuple[str, int], list[tuple[int, Action]]] = defaultdict(list)
        work_s = turns_s = 0.0
        for one, length in messages:
            ends["from", one.source].append((length, one.action))
            ends["to", one.destination].append((length, one.action))
            extra_s = self._extra_s("ring", "all", length, one.action) / self.num_ranks
            work_s += extra_s
            turns_s += self._time("ring", length, one.action) / self.num_ranks - extra_s
        num_turns = max(sum(side == which for which, _ in ends) for side in ("from", "to"))
        work_s += turns_s * num_turns / len(messages)
        return max(work_s, *(self._end_s(sorted(own, key=_length)) for own in ends.values()))

    def _end_s(self, messages: Sequence[tuple[int, Action]]) -> float:
        """Of one rank's messages, from small to large: all at its end."""
        *others, largest = messages
        return self._time("alone", *largest) + sum(
            self._extra_s("alone", "fan", *one) for one in others
        )

    def _extra_s(self, one: str, many: str, length: int, action: Action) -> float:
        """What one message more takes, where ``many`` has P - 1 of each rank for one."""
        if self.num_ranks == 2:
            return self._time("ring", length, action)
        more_s = self._time(many, length, action) - self._time(one, length, action)
        return max(0.0, more_s) / (self.num_ranks - 2)

    def _time(self, kind: str, length: int, action: Action) -> float:
        return at(self.rounds[kind, action], length)


def _curve(points: Any) -> Curve:
    return tuple((count(size), real(seconds)) for size, seconds in points)


def _length(message: tuple[int, Action]) -> int:
    return message[0]


def at(curve: Curve, size: float) -> float:
    """The time at a size: on the straight line between its neighbours, or beyond the last two.

    Example:
        >>> at(((10, 1.0), (20, 3.0)), 15), at(((10, 1.0), (20, 3.0)), 30), at(((10, 1.0),), 5)
        (2.0, 5.0, 1.0)
    """
    (first, least_s), *_ = curve
    if size <= first or len(curve) == 1:
        return least_s
    (before, before_s), (after, after_s) = next(
        (pair for pair in pairwise(curve) if size <= pair[1][0]), curve[-2:]
    )
    rise = (after_s - before_s) / (after - before)
    return before_s + (size - before) * (max(0.0, rise) if size > after else rise)
