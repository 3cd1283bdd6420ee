"""What a collective is: a pure generator of rounds; a round is transfers of chunks between ranks.

    transfer   (source, destination, chunks, action): one message
    chunk      part i of c of a buffer of n elements: elements [i n // c, (i + 1) n // c). Any n is
               legal; where n < c some chunks are empty, and are sent as empty messages
    action     reduce: add to what the destination has; copy: replace it
    round      transfers that may all be under way at once. Each reads what its source had before
               the round; a rank enters its next round when its own transfers of this one are done
    port       a rank with k ports sends at most k and receives at most k messages in a round

What an operation begins and ends with, P ranks, chunk i belonging to rank i P // c:

    operation        a rank begins with                 and ends with
    all-reduce       its own numbers, all chunks        the sum over all ranks, all chunks
    reduce-scatter   its own numbers, all chunks        the sum, the chunks that belong to it
    all-gather       the chunks that belong to it       all chunks
    broadcast        the root: all chunks               all chunks
    reduce           its own numbers, all chunks        the root: the sum
    scatter          the root: all chunks               the chunks that belong to it
    gather           the chunks that belong to it       the root: all chunks
    all-to-all       chunks r P ... r P + P - 1         chunks r, P + r, 2 P + r, ...
                     (rank r, P x P chunks)

A reduce-scatter is an all-gather run backwards, with every copy turned round into a reduce, and so
are a reduce and a broadcast, a gather and a scatter; an all-reduce is one after the other. So a
member may say how chunks spread, and nothing else (`backwards`).

This module must not know tensors, clocks or networks: interpreters do (proof.py, cost.py).

Source: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory,
practice, and experience", Concurrency and Computation 19(13), 2007 (operations, their duality,
cost); LogGP's overhead a message: A. Alexandrov, M. Ionescu, K. Schauser, C. Scheiman, "LogGP:
Incorporating Long Messages into the LogP model", SPAA 1995.
"""

import abc
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise
from typing import ClassVar, NamedTuple

from ..errors import ConfigError


class Action(Enum):
    """What a destination does with a chunk that arrives."""

    REDUCE = "reduce"
    COPY = "copy"


class Operation(Enum):
    """What a collective brings about; see the table above."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SCATTER = "scatter"
    GATHER = "gather"
    ALL_TO_ALL = "all-to-all"

    @property
    def is_reducing(self) -> bool:
        """Whether numbers are added."""
        return self in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.REDUCE)

    @property
    def has_root(self) -> bool:
        """Whether one rank is another than the rest."""
        return self in ROOTED


ROOTED = (Operation.BROADCAST, Operation.REDUCE, Operation.SCATTER, Operation.GATHER)


class ChunkTransfer(NamedTuple):
    """One message of a round."""

    source: int
    destination: int
    chunks: tuple[int, ...]
    action: Action


Round = tuple[ChunkTransfer, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NameNumber:
    """The number in ``name:number`` of a collective: what it means, and its value if left out."""

    symbol: str
    meaning: str
    minimum: int
    default: int | None = None


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
        return 0.0 if self.num_ranks == 1 else self._seconds(operation, size_bytes, link)

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


BACKWARDS = {
    Operation.REDUCE_SCATTER: Operation.ALL_GATHER,
    Operation.REDUCE: Operation.BROADCAST,
    Operation.GATHER: Operation.SCATTER,
}
"""What each of these is backwards."""


def backwards(rounds: Iterable[Round], action: Action) -> Iterator[Round]:
    """The schedule from its end to its beginning, every transfer the other way.

    Where a schedule gives every rank every chunk exactly once, the transfers of a chunk are a tree
    from its owner, and backwards they gather that tree to the owner.
    """
    for transfers in reversed(list(rounds)):
        yield tuple(
            ChunkTransfer(one.destination, one.source, one.chunks, action) for one in transfers
        )


def bounds(num_elements: int, num_chunks: int) -> list[tuple[int, int]]:
    """Where each chunk begins and ends, in elements; as equal as whole elements allow.

    Example:
        >>> bounds(10, 4)
        [(0, 2), (2, 5), (5, 7), (7, 10)]
        >>> bounds(1, 3)
        [(0, 0), (0, 0), (0, 1)]
    """
    edges = [i * num_elements // num_chunks for i in range(num_chunks + 1)]
    return list(pairwise(edges))


def owner_of(chunk: int, num_chunks: int, num_ranks: int) -> int:
    """The rank that a chunk belongs to.

    Example:
        >>> [owner_of(chunk, 8, 4) for chunk in range(8)]
        [0, 0, 1, 1, 2, 2, 3, 3]
    """
    return chunk * num_ranks // num_chunks


def floor_power_of_two(number: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1)
