"""The contract of a collective: who sends which chunk to whom, and the closed formula of its cost.

A member lists the operations that it supports, yields their rounds (transfers.py defines the
terms), and states what they cost between identical ranks. Most members state only how chunks
spread, since adding up is the same schedule run backwards (`Spreading`). A member must not know
tensors, processes or clocks.

Symbols of the formulas: n bytes, P ranks; alpha the latency of a message, o its overhead at each
end, beta the seconds per byte, gamma the seconds of adding a byte.

Source: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory,
practice, and experience", Concurrency and Computation 19(13), 2007 (cost); overhead per message:
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
    """The cost of a message on a network whose ranks are all alike, as the closed formulas use it.

    A message of n bytes takes ``latency_s + overhead_s + n * s_per_byte``. A rank with k messages
    in a round pays ``k * overhead_s``, and all their bytes pass through its one full-duplex port.
    """

    latency_s: float  # alpha
    s_per_byte: float  # beta
    overhead_s: float = 0.0  # o: per message, at each end
    reduce_s_per_byte: float = 0.0  # gamma

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"{name} of a link must be at least 0 and finite, got {value}")

    def round_s(self, num_messages: int, num_bytes: float) -> float:
        """Seconds of a round.

        Args:
            num_messages: sent by the busiest rank.
            num_bytes: of all these messages together.
        """
        if not num_messages:
            return 0.0
        port_s = num_messages * self.overhead_s + num_bytes * self.s_per_byte
        return self.latency_s + port_s


class Collective(abc.ABC):
    """A schedule of who sends which chunk to whom, round by round.

    Invariant: every listed operation ends as the table in transfers.py says, for every number of
    ranks that the collective accepts, and no rank uses more than ``num_ports`` (tests/collectives).
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for --help
    argument: ClassVar[NameNumber | None] = None
    formula: ClassVar[str]  # of the all-reduce, as text; formula_s computes it
    is_bound: ClassVar[bool] = False  # whether the formula is an upper bound, not the cost
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
        """Return the schedule for a buffer of this size; another one where the chunks depend on it.

        All ranks have the same number of bytes, so all choose the same schedule.
        """
        return self

    def num_chunks(self, operation: Operation) -> int:
        """The number of chunks that the buffer is cut into."""
        return self.num_ranks**2 if operation is Operation.ALL_TO_ALL else self.num_ranks

    def num_ports(self, operation: Operation) -> int:
        """The most messages that a rank sends, or receives, in a round."""
        return 1

    def rounds(self, operation: Operation, root: int = 0) -> Iterator[Round]:
        """Yield the rounds of an operation.

        Args:
            root: the root of operations that have one, from 0 to ``num_ranks - 1``.

        Raises:
            ConfigError: the collective does not have the operation, or not for this many ranks; or
                there is no such root.
        """
        if operation not in self.operations:
            names = ", ".join(supported.value for supported in self.operations)
            raise ConfigError(f"{self} has no {operation.value}; it has {names}")
        if not 0 <= root < self.num_ranks:
            last = self.num_ranks - 1
            raise ConfigError(f"root must be a rank from 0 to {last}, got {root}")
        self.check(operation)
        if self.num_ranks == 1:
            return iter(())
        return iter(self._rounds(operation, root))

    def check(self, operation: Operation) -> None:
        """Raise a ConfigError if the operation does not fit the number of ranks."""
        return

    def formula_s(self, operation: Operation, size_bytes: float, link: LinkCost) -> float:
        """Seconds by the closed formula: identical ranks, counted from when all of them are ready.

        Args:
            size_bytes: of the whole buffer; for an all-to-all, what one rank begins with. The
                formula takes all chunks as equally large.
        """
        if self.num_ranks == 1:
            return 0.0
        return self.for_size(size_bytes)._seconds(operation, size_bytes, link)

    @abc.abstractmethod
    def _rounds(self, operation: Operation, root: int) -> Iterable[Round]:
        """Yield the rounds for two or more ranks."""

    @abc.abstractmethod
    def _seconds(self, operation: Operation, size_bytes: float, link: LinkCost) -> float:
        """Seconds by the formula for two or more ranks."""


class Spreading(Collective):
    """A collective that states how chunks spread; adding up is the same schedule run backwards.

    A member gives the rounds of an all-gather, a broadcast or a scatter, and what they cost. Its
    all-reduce is a reduce-scatter and an all-gather if it has them, otherwise a reduce and a
    broadcast with ``_hub`` as the root.
    """

    _hub = 0

    @abc.abstractmethod
    def _spread(self, operation: Operation, root: int) -> Iterable[Round]:
        """Yield the rounds of an operation that only copies: no reduce, no gather."""

    @abc.abstractmethod
    def _spread_s(
        self, operation: Operation, size_bytes: float, link: LinkCost
    ) -> tuple[float, float]:
        """The cost of ``_spread``.

        Returns:
            Its seconds, and the bytes that are added one after another when it runs backwards.
        """

    def _second_half(self) -> Operation:
        """The operation that ends an all-reduce; its first half is the same one run backwards."""
        has_all_gather = Operation.ALL_GATHER in self.operations
        return Operation.ALL_GATHER if has_all_gather else Operation.BROADCAST

    def _rounds(self, operation: Operation, root: int) -> Iterable[Round]:
        if operation is Operation.ALL_REDUCE:
            forward = self._second_half()
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
            forward = self._second_half()
        spread_s, reduced_bytes = self._spread_s(forward, size_bytes, link)
        reduce_s = reduced_bytes * link.reduce_s_per_byte if operation.is_reducing else 0.0
        return (2.0 if is_all_reduce else 1.0) * spread_s + reduce_s
