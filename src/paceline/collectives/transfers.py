"""The vocabulary of schedules: operations, and rounds of transfers of chunks between ranks.

    transfer   (source, destination, chunks, action): one message
    chunk      part i of c of a buffer of n elements: elements [i n // c, (i + 1) n // c). Any n is
               legal; if n < c some chunks are empty, and are sent as empty messages
    action     reduce: add to what the destination has; copy: replace it
    round      transfers that may all be under way at once. Each reads what its source had before
               the round; a rank enters its next round when its own transfers of this one are done
    port       a rank with k ports sends at most k and receives at most k messages in a round

What each rank begins and ends with, for P ranks; chunk i belongs to rank i P // c:

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

A reduce-scatter is an all-gather run backwards, with every copy turned round into a reduce. In the
same way a reduce is a broadcast run backwards and a gather a scatter; an all-reduce is a
reduce-scatter followed by an all-gather. So a member need only state how chunks spread
(`backwards`).

This module must not know tensors, clocks or networks; its interpreters do (proof.py, cost.py).

Source: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory,
practice, and experience", Concurrency and Computation 19(13), 2007 (operations and
their duality).
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import pairwise
from typing import NamedTuple


class Action(Enum):
    """What a destination does with a chunk that arrives."""

    REDUCE = "reduce"
    COPY = "copy"


class Operation(Enum):
    """What a collective achieves; see the table above."""

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
        """Whether the operation adds the ranks' numbers."""
        return self in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.REDUCE)

    @property
    def has_root(self) -> bool:
        """Whether one rank, the root, has another part than the rest."""
        return self in ROOTED


def moved_share(operation: Operation, num_ranks: int) -> float:
    """The bytes that a rank's link must carry at least, per byte of the buffer.

    Example:
        >>> moved_share(Operation.ALL_REDUCE, 4), moved_share(Operation.BROADCAST, 4)
        (1.5, 1.0)
    """
    if operation in (Operation.BROADCAST, Operation.REDUCE):
        return 1.0
    return (2 if operation is Operation.ALL_REDUCE else 1) * (num_ranks - 1) / num_ranks


ROOTED = (Operation.BROADCAST, Operation.REDUCE, Operation.SCATTER, Operation.GATHER)


BACKWARDS = {
    Operation.REDUCE_SCATTER: Operation.ALL_GATHER,
    Operation.REDUCE: Operation.BROADCAST,
    Operation.GATHER: Operation.SCATTER,
}
"""Operations that are others run backwards, and those others."""


class ChunkTransfer(NamedTuple):
    """One message of a round."""

    source: int
    destination: int
    chunks: tuple[int, ...]
    action: Action


Round = tuple[ChunkTransfer, ...]


def backwards(rounds: Iterable[Round], action: Action) -> Iterator[Round]:
    """Yield the rounds from last to first, with every transfer's direction reversed.

    If a schedule gives every chunk to every rank exactly once, the transfers of a chunk form a tree
    rooted at its owner; run backwards, they collect the contributions of that tree at the owner.
    """
    for transfers in reversed(list(rounds)):
        yield tuple(
            ChunkTransfer(transfer.destination, transfer.source, transfer.chunks, action)
            for transfer in transfers
        )


def bounds(num_elements: int, num_chunks: int) -> list[tuple[int, int]]:
    """Return each chunk's (begin, end) in elements, as equally long as whole elements allow.

    Example:
        >>> bounds(10, 4)
        [(0, 2), (2, 5), (5, 7), (7, 10)]
        >>> bounds(1, 3)
        [(0, 0), (0, 0), (0, 1)]
    """
    edges = [i * num_elements // num_chunks for i in range(num_chunks + 1)]
    return list(pairwise(edges))


def owner_of(chunk: int, num_chunks: int, num_ranks: int) -> int:
    """Return the rank that a chunk belongs to.

    Example:
        >>> [owner_of(chunk, 8, 4) for chunk in range(8)]
        [0, 0, 1, 1, 2, 2, 3, 3]
    """
    return chunk * num_ranks // num_chunks


def floor_power_of_two(number: int) -> int:
    """Return the largest power of two that is at most ``number``."""
    return 1 << (number.bit_length() - 1)
