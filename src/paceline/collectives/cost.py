"""The cost of a schedule on a topology: its seconds, and the bytes that each rank sends.

    rank 0  |--- round 0 ---|------ round 1 ------|          a rank enters its next round when all
    rank 1  |--- round 0 ---|      |-- round 1 ---|          its messages of this one have arrived;
    rank 2           |--- round 0 --------|-- round 1 ----|  a message begins when both ends are
            ready_s: rank 2 comes late                       ready

    a message takes     the latencies of its links
                        + overhead_s times the messages of the busier of its two ends
                        + the longest, over its links, of (bytes of this round on it) / bandwidth
    then                reduce_s_per_byte times the bytes that its destination adds in this round

Messages of one round share links as if they were under way at the same time, which is exact if they
are; messages of different rounds do not slow one another down. On the flat topology the result
equals every member's closed formula (tests/collectives/test_cost.py).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .base import Collective, LinkCost
from .topology import Topology, flat
from .transfers import Action, Operation, Round, bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """What an operation costs."""

    seconds: float  # from 0 until the last rank is done
    done_s: tuple[float, ...]  # when each rank is done
    sent_bytes: tuple[int, ...]  # by each rank
    num_rounds: int


def cost_on(
    topology: Topology,
    collective: Collective,
    operation: Operation,
    size_bytes: int,
    *,
    root: int = 0,
    overhead_s: float = 0.0,
    reduce_s_per_byte: float = 0.0,
    ready_s: Sequence[float] = (),
) -> CollectiveCost:
    """Run a schedule in virtual time, and return what it costs.

    Args:
        size_bytes: of the whole buffer; for an all-to-all, what one rank begins with.
        overhead_s: per message, at each end.
        reduce_s_per_byte: of adding a byte.
        ready_s: when each rank is ready to begin; empty means all at 0.

    Raises:
        ConfigError: the topology, the schedule and the times are not for the same number of ranks.
    """
    num_ranks = collective.num_ranks
    collective = collective.for_size(size_bytes)
    if topology.num_ranks != num_ranks:
        raise ConfigError(
            f"{topology.name} has {topology.num_ranks} ranks, but {collective} has {num_ranks}"
        )
    if ready_s and len(ready_s) != num_ranks:
        raise ConfigError(
            f"ready_s needs one time for each of {num_ranks} ranks, got {len(ready_s)}"
        )
    free_s = list(ready_s) or [0.0] * num_ranks
    total = num_ranks * size_bytes if operation is Operation.ALL_TO_ALL else size_bytes
    chunk_bytes = [end - begin for begin, end in bounds(total, collective.num_chunks(operation))]
    sent_bytes, num_rounds = [0] * num_ranks, 0
    for transfers in collective.rounds(operation, root):
        lengths = [sum(chunk_bytes[chunk] for chunk in transfer.chunks) for transfer in transfers]
        for transfer, length in zip(transfers, lengths, strict=True):
            sent_bytes[transfer.source] += length
        _run_round(topology, transfers, lengths, free_s, overhead_s, reduce_s_per_byte)
        num_rounds += 1
    return CollectiveCost(
        seconds=max(free_s),
        done_s=tuple(free_s),
        sent_bytes=tuple(sent_bytes),
        num_rounds=num_rounds,
    )


def _run_round(
    topology: Topology,
    transfers: Round,
    lengths: list[int],
    free_s: list[float],
    overhead_s: float,
    reduce_s_per_byte: float,
) -> None:
    """Advance ``free_s``, the time at which each rank is free, by one round."""
    paths = [topology.way(transfer.source, transfer.destination) for transfer in transfers]
    link_bytes: Counter[int] = Counter()
    sent, received = Counter[int](), Counter[int]()
    for transfer, path, length in zip(transfers, paths, lengths, strict=True):
        sent[transfer.source] += 1
        received[transfer.destination] += 1
        for index in path:
            link_bytes[index] += length
    done_s, added_bytes = list(free_s), Counter[int]()
    for transfer, path, length in zip(transfers, paths, lengths, strict=True):
        ends = (transfer.source, transfer.destination)
        links = [topology.links[index] for index in path]
        message_s = sum(link.latency_s for link in links)
        message_s += overhead_s * max(max(sent[end], received[end]) for end in ends)
        message_s += max(link_bytes[index] / topology.links[index].bytes_per_s for index in path)
        arrival_s = max(free_s[end] for end in ends) + message_s
        for end in ends:
            done_s[end] = max(done_s[end], arrival_s)
        if transfer.action is Action.REDUCE:
            added_bytes[transfer.destination] += length
    for rank, num_bytes in added_bytes.items():
        done_s[rank] += num_bytes * reduce_s_per_byte
    free_s[:] = done_s


def cost_between_equals(
    collective: Collective,
    operation: Operation,
    size_bytes: int,
    link: LinkCost,
    *,
    root: int = 0,
    ready_s: Sequence[float] = (),
) -> CollectiveCost:
    """Return the `cost_on` the flat topology of this link; ``s_per_byte`` 0 means no limit."""
    bytes_per_s = 1.0 / link.s_per_byte if link.s_per_byte else float("inf")
    return cost_on(
        flat(collective.num_ranks, latency_s=link.latency_s, bytes_per_s=bytes_per_s),
        collective,
        operation,
        size_bytes,
        root=root,
        overhead_s=link.overhead_s,
        reduce_s_per_byte=link.reduce_s_per_byte,
        ready_s=ready_s,
    )
