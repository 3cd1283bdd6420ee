"""The cost of a schedule between processes that share one machine's cores, from measured rounds.

Identical ranks of a network (cost.py) do not slow one another down. Processes of one machine do: if
there are more of them than cores, a round takes what all its messages take together, however short
each is, and the schedule with the fewest messages wins. So whole rounds are measured, each kind at
several sizes:

    alone    0 -> 1, all others wait                        t_1(n)
    ring     r -> r + 1, all at the same time               t_r(n)     P messages
    fan      all -> 0, and 0 -> all                         t_f(n)     P - 1, all at one rank
    all      every rank -> every other one                  t_a(n)     P (P - 1)

A round of a schedule takes the longer of

    span     the busiest rank: t_1 of its largest message, and (t_f - t_1) / (P - 2) of each other
    work     all messages: x(n) each, and t_r / P - x for each rank that takes part,
             x = (t_a - t_r) / (P (P - 2))                              for two ranks x = t_r / 2

which reproduces each kind that was measured. Times between two measured sizes are interpolated
linearly, and extrapolated beyond the largest. Rounds follow one another. The time of adding is part
of a message's time, so each kind is measured for messages that are copied and for messages that
are added.

The model cannot know when a process loses its core while it holds a lock. Gloo's own thread then
polls the same socket until its time slice is over: with four processes on two cores a round of 64 B
takes 1.1 to 7 ms, one or several time slices, compared with 62 us for one message alone (strace:
1,600 epoll_wait in 0.3 s for one message). So with more processes than cores, crossings are a
matter of chance.

Source of span and work: R. Brent, "The parallel evaluation of general arithmetic expressions",
Journal of the ACM 21(2), 1974. Changed: both are measured, not counted.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import Any, Final

from ..errors import ConfigError
from ..fields import count, real
from .base import Collective, LinkCost
from .transfers import Action, ChunkTransfer, Operation, Round, bounds

KINDS: Final = ("alone", "ring", "fan", "all")
"""The kinds of rounds drawn above; two ranks need only the first two."""

Curve = tuple[tuple[int, float], ...]
"""Pairs of a size in bytes and the seconds at that size, from small to large."""


def kinds_of(num_ranks: int) -> tuple[str, ...]:
    """Return the kinds of rounds that this many ranks can form."""
    return KINDS if num_ranks > 2 else KINDS[:2]


class RoundOfKind(Collective):
    """A schedule that consists of one kind of round, to be measured.

    A call runs two rounds for ``alone`` and ``fan``, there and back, and one round for the others.
    Each message is one of P chunks.
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
        num_ranks, is_adding = self.num_ranks, self.action is Action.REDUCE
        if self.kind == "alone":
            yield self._round([(0, 1, 0)])
            yield self._round([(1, 0, 0)])
        elif self.kind == "ring":
            yield self._round([(rank, (rank + 1) % num_ranks, rank) for rank in range(num_ranks)])
        elif self.kind == "fan":
            yield self._round([(rank, 0, 0) for rank in range(1, num_ranks)])
            yield self._round([(0, rank, 0) for rank in range(1, num_ranks)])
        else:
            yield self._round([
                (source, destination, destination if is_adding else source)
                for source, destination in permutations(range(num_ranks), 2)
            ])  # fmt: skip

    def _round(self, messages: Iterable[tuple[int, int, int]]) -> Round:
        """Build a round from its messages' sources, destinations and chunks."""
        return tuple(
            ChunkTransfer(source, destination, (chunk,), self.action)
            for source, destination, chunk in messages
        )

    def _seconds(self, operation: Operation, size_bytes: float, link: LinkCost) -> float:
        raise ConfigError(f"a {self.name} has no formula: it is measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """The seconds of rounds between processes of one machine, as measured there.

    Args:
        num_ranks: the processes, at least 2.
        rounds: seconds of a round at sizes of a message, by the round's kind and the action.
        native_s: seconds of torch.distributed's own all-reduce, at sizes of the buffer; may be
            empty.
        beside_s: by collective, including ``native``: the seconds that an all-reduce under way adds
            to a rank that computes meanwhile, including the cost of its thread. For native it is
            the least that was measured, for a schedule the most. May be empty.

    Raises:
        ConfigError: a kind is missing, sizes do not rise, or a time is not positive.
    """

    num_ranks: int
    rounds: Mapping[tuple[str, Action], Curve]
    native_s: Curve = ()
    beside_s: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expected = {(kind, action) for kind in kinds_of(self.num_ranks) for action in Action}
        if self.num_ranks < 2 or self.rounds.keys() != expected:
            raise ConfigError(
                f"the rounds of {self.num_ranks} processes are incomplete: kinds are missing"
            )
        curves = [*self.rounds.values(), *self.beside_s.values()]
        for curve in (*curves, *([self.native_s] if self.native_s else [])):
            is_rising = all(point[0] < successor[0] for point, successor in pairwise(curve))
            if not curve or not is_rising or not all(n > 0 and 0 < s < 1e6 for n, s in curve):
                raise ConfigError(
                    "invalid times of rounds: sizes must rise, and times must be positive"
                )

    @classmethod
    def read(cls, values: Any) -> "HostCost":
        """Build the cost from what ``write`` returned.

        Raises:
            ValueError, TypeError, KeyError, ConfigError: ``values`` is something else.
        """
        rounds = {
            (str(kind), Action(action)): _curve(points) for kind, action, points in values["rounds"]
        }
        beside_s = {
            str(name): _curve(points) for name, points in dict.items(values.get("beside_s", {}))
        }
        return cls(
            num_ranks=count(values["num_ranks"]), rounds=rounds,
            native_s=_curve(values["native_s"]), beside_s=beside_s,
        )  # fmt: skip

    def write(self) -> dict[str, object]:
        """Return the cost as JSON values, which ``read`` takes."""
        rounds = [[kind, action.value, curve] for (kind, action), curve in self.rounds.items()]
        return {
            "num_ranks": self.num_ranks, "rounds": rounds, "native_s": self.native_s,
            "beside_s": self.beside_s,
        }  # fmt: skip

    def seconds(
        self, collective: Collective, operation: Operation, size_bytes: int, root: int = 0
    ) -> float:
        """The seconds that an operation takes.

        Args:
            size_bytes: of the whole buffer; for an all-to-all, what one rank begins with.

        Raises:
            ConfigError: the collective is for another number of ranks, or has no such operation.
        """
        if collective.num_ranks != self.num_ranks:
            raise ConfigError(
                f"{collective} is for {collective.num_ranks} ranks; {self.num_ranks} were measured"
            )
        collective = collective.for_size(size_bytes)
        is_all_to_all = operation is Operation.ALL_TO_ALL
        total = self.num_ranks * size_bytes if is_all_to_all else size_bytes
        chunk_bytes = [
            end - begin for begin, end in bounds(total, collective.num_chunks(operation))
        ]
        cached_s: dict[object, float] = {}
        seconds = 0.0
        for transfers in collective.rounds(operation, root):
            messages = [
                (transfer, sum(chunk_bytes[chunk] for chunk in transfer.chunks))
                for transfer in transfers
            ]
            key = tuple((*transfer[:2], transfer.action, length) for transfer, length in messages)
            if key not in cached_s:
                cached_s[key] = self._round_s([message for message in messages if message[1]])
            seconds += cached_s[key]
        return seconds

    def native_reduce_s(self, size_bytes: int) -> float:
        """The seconds of torch.distributed's own all-reduce, if it was measured."""
        return at(self.native_s, size_bytes)

    def _round_s(self, messages: Sequence[tuple[ChunkTransfer, int]]) -> float:
        """The longer of a round's span and its work, in seconds."""
        if not messages:
            return 0.0
        at_ends: dict[tuple[str, int], list[tuple[int, Action]]] = defaultdict(list)
        work_s = ranks_s = 0.0
        for transfer, length in messages:
            at_ends["from", transfer.source].append((length, transfer.action))
            at_ends["to", transfer.destination].append((length, transfer.action))
            extra_s = self._extra_s("ring", "all", length, transfer.action) / self.num_ranks
            work_s += extra_s
            ranks_s += self._kind_s("ring", length, transfer.action) / self.num_ranks - extra_s
        num_active = max(sum(side == end for end, _ in at_ends) for side in ("from", "to"))
        work_s += ranks_s * num_active / len(messages)
        spans = (self._span_s(sorted(lengths, key=_length)) for lengths in at_ends.values())
        return max(work_s, *spans)

    def _span_s(self, messages: Sequence[tuple[int, Action]]) -> float:
        """The seconds of the messages that one rank sends, or receives; from small to large."""
        *others, largest = messages
        return self._kind_s("alone", *largest) + sum(
            self._extra_s("alone", "fan", *message) for message in others
        )

    def _extra_s(self, single: str, multiple: str, length: int, action: Action) -> float:
        """The seconds of one message more at a rank.

        Args:
            single: a kind of round with one message at each of its ranks.
            multiple: a kind with P - 1 messages at such a rank.
            length: of the message, in bytes.
        """
        if self.num_ranks == 2:
            return self._kind_s("ring", length, action)
        more_s = self._kind_s(multiple, length, action) - self._kind_s(single, length, action)
        return max(0.0, more_s) / (self.num_ranks - 2)

    def _kind_s(self, kind: str, length: int, action: Action) -> float:
        return at(self.rounds[kind, action], length)


def _curve(points: Any) -> Curve:
    return tuple((count(size), real(seconds)) for size, seconds in points)


def _length(message: tuple[int, Action]) -> int:
    return message[0]


def at(curve: Curve, size: float) -> float:
    """Return the seconds at a size, interpolated linearly, or extrapolated beyond the last point.

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
