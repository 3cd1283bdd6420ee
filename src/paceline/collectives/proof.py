"""A schedule without bytes: on sets of contributors, which proves it, and on plain numbers.

    rank 1, chunk 3     {1} --reduce {0}--> {0, 1} --reduce {2, 3}--> {0, 1, 2, 3}

Of every chunk that a rank holds we know whose numbers are in it. A reduce joins two sets that have
nobody in common, so nobody is counted twice; a copy replaces a set. If all end with the sets that
the operation promises, then the schedule is right for every buffer and every addition that is
associative and commutative, not only for the numbers that were tried. On floating-point numbers
every rank has to end with the same bits, too: `on_numbers` shows which it ends with.

What is broken is a ProtocolError with round, rank and chunk: a schedule is ours.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, ProtocolError
from .base import Collective
from .transfers import Action, Operation, Round, bounds, owner_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleProof:
    """What a schedule that was proved takes."""

    num_rounds: int
    num_messages: int
    most_sent: int  # by one rank in one round
    most_received: int
    chunks_sent: tuple[int, ...]  # a rank


def prove(collective: Collective, operation: Operation, root: int = 0) -> ScheduleProof:
    """Runs the schedule on sets of contributors, and looks at every message.

    Raises:
        ProtocolError: a message is from or to no rank, or to its own source; it sends what its
            source does not have, adds somebody twice, or meets another copy of its chunk; a rank
            uses more ports than the collective says; or somebody ends without what is promised.
    """
    size, num_chunks = collective.num_ranks, collective.num_chunks(operation)
    held = [
        [
            _begins_with(operation, rank, chunk, num_chunks, size, root)
            for chunk in range(num_chunks)
        ]
        for rank in range(size)
    ]
    num_rounds, num_messages, most_sent, most_received = 0, 0, 0, 0
    chunks_sent = [0] * size
    for number, transfers in enumerate(collective.rounds(operation, root)):
        where = f"{collective}, {operation.value} of {size}, round {number}"
        sent, received = _ports(transfers, size, where)
        most_sent, most_received = max(most_sent, sent), max(most_received, received)
        if max(sent, received) > (ports := collective.num_ports(operation)):
            raise ProtocolError(
                f"{where}: {max(sent, received)} messages at a rank of {ports} ports"
            )
        _apply(held, transfers, where)
        for one in transfers:
            chunks_sent[one.source] += len(one.chunks)
        num_rounds, num_messages = number + 1, num_messages + len(transfers)
    for rank in range(size):
        for chunk in range(num_chunks):
            wanted = _ends_with(operation, rank, chunk, num_chunks, size, root)
            if wanted is not None and held[rank][chunk] != wanted:
                raise ProtocolError(
                    f"{collective}, {operation.value} of {size}: rank {rank} ends with "
                    f"{_names(held[rank][chunk])} in chunk {chunk}, not with {_names(wanted)}"
                )
    return ScheduleProof(
        num_rounds=num_rounds,
        num_messages=num_messages,
        most_sent=most_sent,
        most_received=most_received,
        chunks_sent=tuple(chunks_sent),
    )


def _ports(transfers: Round, size: int, where: str) -> tuple[int, int]:
    """The most that one rank sends, and that one receives."""
    for one in transfers:
        if not (0 <= one.source < size and 0 <= one.destination < size):
            raise ProtocolError(f"{where}: a message from {one.source} to {one.destination}")
        if one.source == one.destination:
            raise ProtocolError(f"{where}: rank {one.source} sends to itself")
    sent = Counter(one.source for one in transfers)
    received = Counter(one.destination for one in transfers)
    return max(sent.values(), default=0), max(received.values(), default=0)


def _apply(held: list[list[int]], transfers: Round, where: str) -> None:
    """One round: all read before anybody writes."""
    read = [[held[one.source][chunk] for chunk in one.chunks] for one in transfers]
    copied: set[tuple[int, int]] = set()
    changed: set[tuple[int, int]] = set()
    for one, values in zip(transfers, read, strict=True):
        for chunk, value in zip(one.chunks, values, strict=True):
            at, place = f"{where}: rank {one.destination}, chunk {chunk}", (one.destination, chunk)
            if not value:
                raise ProtocolError(f"{at}: rank {one.source} sends what it does not have")
            if place in copied or (one.action is Action.COPY and place in changed):
                raise ProtocolError(f"{at}: two messages write it, and one is a copy")
            changed.add(place)
            if one.action is Action.COPY:
                copied.add(place)
                held[one.destination][chunk] = value
            elif not held[one.destination][chunk] or held[one.destination][chunk] & value:
                mine = _names(held[one.destination][chunk])
                raise ProtocolError(f"{at}: it has {mine} and adds {_names(value)}")
            else:
                held[one.destination][chunk] |= value


def _begins_with(
    operation: Operation, rank: int, chunk: int, num_chunks: int, size: int, root: int
) -> int:
    """Whose numbers a rank has in a chunk before the first round, a bit for each rank."""
    if operation.is_reducing:
        return 1 << rank
    if operation in (Operation.BROADCAST, Operation.SCATTER):
        return 1 << rank if rank == root else 0
    return 1 << rank if owner_of(chunk, num_chunks, size) == rank else 0


def _ends_with(
    operation: Operation, rank: int, chunk: int, num_chunks: int, size: int, root: int
) -> int | None:
    """Whose numbers a rank has to have in a chunk after the last round; None: no matter."""
    owner = owner_of(chunk, num_chunks, size)
    is_its_own = {
        Operation.REDUCE: rank == root,
        Operation.GATHER: rank == root,
        Operation.REDUCE_SCATTER: owner == rank,
        Operation.SCATTER: owner == rank,
        Operation.ALL_TO_ALL: chunk % size == rank,
    }.get(operation, True)
    if not is_its_own:
        return None
    if operation.is_reducing:
        return (1 << size) - 1
    return 1 << (root if operation in (Operation.BROADCAST, Operation.SCATTER) else owner)


def _names(contributors: int) -> str:
    ranks = [str(rank) for rank in range(contributors.bit_length()) if contributors >> rank & 1]
    return "{" + ", ".join(ranks) + "}"


def on_numbers(
    collective: Collective,
    operation: Operation,
    buffers: Sequence[Sequence[float]],
    root: int = 0,
) -> list[list[float]]:
    """What every rank's buffer holds after the schedule, numbers for numbers.

    Args:
        buffers: one a rank, all of the same length n, also shorter than there are chunks.

    Raises:
        ConfigError: there is not one buffer for each rank, or they differ in length.

    Example:
        >>> from paceline.collectives import parse
        >>> on_numbers(parse("ring", 3), Operation.ALL_REDUCE, [[1, 2], [10, 20], [100, 200]])
        [[111, 222], [111, 222], [111, 222]]
    """
    if len(buffers) != collective.num_ranks or len({len(one) for one in buffers}) != 1:
        lengths = [len(one) for one in buffers]
        raise ConfigError(
            f"{collective.num_ranks} ranks need as many buffers of one length, got {lengths}"
        )
    now = [list(one) for one in buffers]
    edges = bounds(len(now[0]), collective.num_chunks(operation))
    for transfers in collective.rounds(operation, root):
        read = [
            [now[one.source][slice(*edges[chunk])] for chunk in one.chunks] for one in transfers
        ]
        for one, parts in zip(transfers, read, strict=True):
            mine = now[one.destination]
            for chunk, part in zip(one.chunks, parts, strict=True):
                begin, end = edges[chunk]
                if one.action is Action.REDUCE:
                    part = [a + b for a, b in zip(mine[begin:end], part, strict=True)]
                mine[begin:end] = part
    return now
