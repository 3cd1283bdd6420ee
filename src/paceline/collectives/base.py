"""What a collective is: who sends which chunk to whom, and what that costs by its closed formula.

A member lists the operations that it has, gives their rounds (the words stand in transfers.py), and
says what they take between equals. Most say only how chunks spread: adding up is the same,
backwards (`Spreading`). A member must not know tensors, processes or clocks.

Of the formulas: n bytes, P ranks; alpha the latency of a message, o what it costs each end, beta
the seconds a byte, gamma the seconds of adding a byte.

Source: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory,
practice, and experience", Concurrency and Computation 19(13), 2007 (cost); the overhead a message:
A. Alexandrov, M. Ionescu, K. Schauser, C. Scheiman, "LogGP: Incorporating Long Messages into the
LogP model", SPAA 1995.
"""

import abc
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from ..errors import ConfigError
from ..fields import NameNumber
from .transfers import BACKWARDS, Action, Operation, Round, backwards


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """What a message costs on a network whose ranks are all alike, as the closed formulas have it.

    A message of n bytes takes ``latency_s + overhead_s + n * s_per_byte``; a rank that has k of
    them in a round has ``k * overhead_s`` and all their bytes on its one full-duplex port.
    """

    latency_s: float  # alpha
    s_per_byte: float  # beta
    overhead_s: float = 0.0  # o: a message, at each end
    reduce_s_per_byte: float = 0.0  # gamma

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"{name} of a link must be at least 0 and finite, got {value}")

    def round_s(self, num_messages: int, num_bytes: float) -> float:
        """A round in which the busiest rank sends so many messages of so many bytes together."""
        if not num_messages:
            return 0.0
        port_s = num_messages * self.overhead_s + num_bytes * self.s_per_byte
        return self.latency_s + port_s


class Collective(abc.ABC):
    """Who sends which chunk to whom, round by round.

    Invariant: every operation that it lists ends as the table of this module says, for every number
    of ranks that it accepts, and no rank uses more than ``num_ports`` (tests/collectives).
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for --help
    argument: ClassVar[NameNumber | None] = None
    formula: ClassVar[str]  # of its all-reduce, as text; formula_s computes it
    is_bound: ClassVar[bool] = False  # whether its formula is an upper bound, not the cost
    operations: ClassVar[tuple[Operation, ...]]

    def __init__(self, num_ranks: int, value: int | None = None) -> None:
        if num_ranks < 1:
            raise ConfigError(f"a collective needs at least 1 rank, got {num_ranks}")
        argument = self.argument
        if argument is not None:
            value = argument.default if value is None else value
            assert value is not None  # parse() asks for it
            if value < argument.minimum:
                raise ConfigError(
                    f"{self.name}:{argument.symbol} needs {argument.symbol} >= {argument.minimum} "
                    f"({argument.meaning}), got {self.name}:{value}; "
                    f"try {self.name}:{argument.minimum}"
                )
        self.num_ranks = num_ranks
        self.value = value

    def __str__(self) -> str:
        is_default = self.argument is None or self.value == self.argument.default
        return self.name if is_default else f"{self.name}:{self.value}"

    def for_size(self, size_bytes: float) -> "Collective":
        """The schedule of a buffer of so many bytes: another one where cuts depend on them.

        All ranks have equally many bytes, so all take the same.
        """
        return self

    def num_chunks(self, operation: Operation) -> int:
        """Into how many parts the buffer is cut."""
        return self.num_ranks**2 if operation is Operation.ALL_TO_ALL else self.num_ranks

    def num_ports(self, operation: Operation) -> int:
        """The most messages that a rank sends, or receives, in a round."""
        return 1

    def rounds(self, operation: Operation, root: int = 0) -> Iterator[Round]:
        """The schedule.

        Args:
            root: where the operation has one, from 0 to ``num_ranks - 1``.

        Raises:
            ConfigError: it has no such operation, has it not for so many ranks, or there is no
                such root.
        """
        if operation not in self.operations:
            have = ", ".join(one.value for one in self.operations)
            raise ConfigError(f"{self} has no {operation.value}; it has {have}")
        if not 0 <= root < self.num_ranks:
            last = self.num_ranks - 1
            raise ConfigError(
                f"root {root} is no rank of {self.num_ranks}; give one of 0 to {last}"
            )
        self.check(operation)
        if self.num_ranks == 1:
            return iter(())
        return iter(self._rounds(operation, root))

    def check(self, operation: Operation) -> None:
        """Raises ConfigError where the operation does not fit the number of ranks."""
        return

    def formula_s(self, operation: Operation, size_bytes: float, link: LinkCost) -> float:
        """Its closed formula: seconds from when all ranks are there, on a network of equals.

        Args:
            size_bytes: the whole buffer; of an all-to-all what one rank begins with. The formula
                takes all chunks as equal.
        """
        if self.num_ranks == 1:
            return 0.0
        return self.for_size(size_bytes)._seconds(operation, size_bytes, link)

    @abc.abstractmethod
    def _rounds(self, operation: Operation, root: int) -> Iterable[Round]:
        """The schedule of two ranks or more."""

    @abc.abstractmethod
    def _seconds(self, operation: Operation, size_bytes: float, link: LinkCost) -> float:
        """The formula for two ranks or more."""


class Spreading(Collective):
    """A collective that says how chunks spread; adding up is the same, backwards.

    A member gives the rounds of an all-gather, a broadcast or a scatter and what they cost; the
    all-reduce is a reduce-scatter and an all-gather where it has them, else a reduce and a
    broadcast, at ``_hub``.
    """

    _hub = 0

    @abc.abstractmethod
    def _spread(self, operation: Operation, root: int) -> Iterable[Round]:
        """The rounds of an operation that only copies: no reduce, no gather."""

    @abc.abstractmethod
    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        """Seconds of ``_spread``, and the bytes that one rank after another adds, backwards."""

    def _all_reduce_of(self) -> Operation:
        whole = Operation.ALL_GATHER in self.operations
        return Operation.ALL_GATHER if whole else Operation.BROADCAST

    def _rounds(self, operation: Operation, root: int) -> Iterable[Round]:
        if operation is Operation.ALL_REDUCE:
            forward = self._all_reduce_of()
            adding = backwards(self._spread(forward, self._hub), Action.REDUCE)
            return chain(adding, self._spread(forward, self._hub))
        if operation in BACKWARDS:
            action = Action.REDUCE if operation.is_reducing else Action.COPY
            return backwards(self._spread(BACKWARDS[operation], root), action)
        return self._spread(operation, root)

    def _seconds(self, operation: Operation, size_bytes: float, link: LinkCost) -> float:
        is_all_reduce = operation is Operation.ALL_REDUCE
        forward = BACKWARDS.get(operation, operation)
        if is_all_reduce:
            forward = self._all_reduce_of()
        spread_s, reduced_bytes = self._spread_s(forward, size_bytes, link)
        reduce_s = reduced_bytes * link.reduce_s_per_byte if operation.is_reducing else 0.0
        return (2.0 if is_all_reduce else 1.0) * spread_s + reduce_s
