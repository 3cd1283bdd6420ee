"""Runs schedules without tensors: on sets of contributors, to prove them, and on plain numbers.

    rank 1, chunk 3     {1} --reduce {0}--> {0, 1} --reduce {2, 3}--> {0, 1, 2, 3}

For every chunk that a rank holds, the proof tracks whose numbers are in it. A reduce joins two
disjoint sets, so that no contribution is counted twice; a copy replaces a set. If all ranks end
with the sets that the operation promises, the schedule is right for every buffer and every
associative and commutative addition, not only for the numbers that were tried. With floating-point
numbers all ranks have to end with the same bits, too: `on_numbers` returns what each ends with.

A broken rule is a ProtocolError that names round, rank and chunk, since schedules are our own code.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, ProtocolError
from .base import Collective
from .transfers import Action, Operation, Round, bounds, owner_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleProof:
    """The counts of a schedule that was proved correct."""

    num_rounds: int
    num_messages: int
    most_sent: int  # messages by one rank in one round
    most_received: int
    chunks_sent: tuple[int, ...]  # by each rank


def prove(collective: Collective, operation: Operation, root: int = 0) -> ScheduleProof:
    """Run a schedule on sets of contributors, checking every message, and return its counts.

    Raises:
        ProtocolError: a message is from or to no rank, or to its own source; it sends what its
            source does not have, adds a contribution twice, or collides with another copy of its
            chunk; a rank uses more ports than the collective says; or a rank ends without what
            the operation promises.
    """
    num_ranks, num_chunks = collective.num_ranks, collective.num_chunks(operation)
    held = [
        [
            _begins_with(operation, rank, chunk, num_chunks, num_ranks, root)
            for chunk in range(num_chunks)
        ]
        for rank in range(num_ranks)
    ]
    num_rounds, num_messages, most_sent, most_received = 0, 0, 0, 0
    chunks_sent = [0] * num_ranks
    for number, transfers in enumerate(collective.rounds(operation, root)):
        context = f"{collective}, {operation.value} of {num_ranks}, round {number}"
        sent, received = _ports(transfers, num_ranks, context)
        most_sent, most_received = max(most_sent, sent), max(most_received, received)
        if max(sent, received) > (ports := collective.num_ports(operation)):
            raise ProtocolError(
                f"{context}: {max(sent, received)} messages at a rank of {ports} ports"
            )
        _apply(held, transfers, context)
        for transfer in transfers:
            chunks_sent[transfer.source] += len(transfer.chunks)
        num_rounds, num_messages = number + 1, num_messages + len(transfers)
    for rank in range(num_ranks):
        for chunk in range(num_chunks):
            expected = _ends_with(operation, rank, chunk, num_chunks, num_ranks, root)
            if expected is not None and held[rank][chunk] != expected:
                raise ProtocolError(
                    f"{collective}, {operation.value} of {num_ranks}: rank {rank} ends with "
                    f"{_names(held[rank][chunk])} in chunk {chunk}, not with {_names(expected)}"
                )
    return ScheduleProof(
        num_rounds=num_rounds,
        num_messages=num_messages,
        most_sent=most_sent,
        most_received=most_received,
        chunks_sent=tuple(chunks_sent),
    )


def _ports(transfers: Round, num_ranks: int, context: str) -> tuple[int, int]:
    """Return the most messages that one rank sends, and the most that one receives."""
    for transfer in transfers:
        if not (0 <= transfer.source < num_ranks and 0 <= transfer.destination < num_ranks):
            raise ProtocolError(
                f"{context}: a message from {transfer.source} to {transfer.destination}"
            )
        if transfer.source == transfer.destination:
            raise ProtocolError(f"{context}: rank {transfer.source} sends to itself")
    sent = Counter(transfer.source for transfer in transfers)
    received = Counter(transfer.destination for transfer in transfers)
    return max(sent.values(), default=0), max(received.values(), default=0)


def _apply(held: list[list[int]], transfers: Round, context: str) -> None:
    """Apply one round to ``held``; all transfers read before any of them writes."""
    sent = [[held[transfer.source][chunk] for chunk in transfer.chunks] for transfer in transfers]
    copied: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()
    for (source, rank, chunks, action), values in zip(transfers, sent, strict=True):
        for chunk, value in zip(chunks, values, strict=True):
            at, target = f"{context}: rank {rank}, chunk {chunk}", (rank, chunk)
            if not value:
                raise ProtocolError(f"{at}: rank {source} sends what it does not have")
            if target in copied or (action is Action.COPY and target in written):
                raise ProtocolError(f"{at}: two messages write it, and one is a copy")
            written.add(target)
            if action is Action.COPY:
                copied.add(target)
                held[rank][chunk] = value
            elif not held[rank][chunk] or held[rank][chunk] & value:
                present = _names(held[rank][chunk])
                raise ProtocolError(f"{at}: it has {present} and adds {_names(value)}")
            else:
                held[rank][chunk] |= value


def _begins_with(
    operation: Operation, rank: int, chunk: int, num_chunks: int, num_ranks: int, root: int
) -> int:
    """The contributors to a rank's chunk before the first round, as a bit mask of ranks."""
    if operation.is_reducing:
        return 1 << rank
    if operation in (Operation.BROADCAST, Operation.SCATTER):
        return 1 << rank if rank == root else 0
    return 1 << rank if owner_of(chunk, num_chunks, num_ranks) == rank else 0


def _ends_with(
    operation: Operation, rank: int, chunk: int, num_chunks: int, num_ranks: int, root: int
) -> int | None:
    """The contributors that a rank's chunk must have after the last round; None: any."""
    owner = owner_of(chunk, num_chunks, num_ranks)
    is_promised = {
        Operation.REDUCE: rank == root,
        Operation.GATHER: rank == root,
        Operation.REDUCE_SCATTER: owner == rank,
        Operation.SCATTER: owner == rank,
        Operation.ALL_TO_ALL: chunk % num_ranks == rank,
    }.get(operation, True)
    if not is_promised:
        return None
    if operation.is_reducing:
        return (1 << num_ranks) - 1
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
    """Run a schedule on lists of numbers, and return every rank's list as it is afterwards.

    Args:
        buffers: one for each rank, all of the same length, which may be less than the number of
            chunks.

    Raises:
        ConfigError: there is not exactly one buffer for each rank, or they differ in length.

    Example:
        >>> from paceline.collectives import parse
        >>> on_numbers(parse("ring", 3), Operation.ALL_REDUCE, [[1, 2], [10, 20], [100, 200]])
        [[111, 222], [111, 222], [111, 222]]
    """
    if len(buffers) != collective.num_ranks or len({len(buffer) for buffer in buffers}) != 1:
        lengths = [len(buffer) for buffer in buffers]
        raise ConfigError(
            f"{collective.num_ranks} ranks need as many buffers of one length, got {lengths}"
        )
    contents = [list(buffer) for buffer in buffers]
    edges = bounds(len(contents[0]), collective.num_chunks(operation))
    for transfers in collective.rounds(operation, root):
        sent = [
            [contents[transfer.source][slice(*edges[chunk])] for chunk in transfer.chunks]
            for transfer in transfers
        ]
        for transfer, parts in zip(transfers, sent, strict=True):
            target = contents[transfer.destination]
            for chunk, part in zip(transfer.chunks, parts, strict=True):
                begin, end = edges[chunk]
                if transfer.action is Action.REDUCE:
                    part = [a + b for a, b in zip(target[begin:end], part, strict=True)]
                target[begin:end] = part
    return contents
