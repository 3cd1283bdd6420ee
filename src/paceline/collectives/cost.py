"""A schedule on a topology: seconds until all are done, and the bytes that each rank sends.

    rank 0  |--- round 0 ---|------ round 1 ------|          a rank enters its next round when all
    rank 1  |--- round 0 ---|      |-- round 1 ---|          its messages of this one have arrived;
    rank 2           |--- round 0 --------|-- round 1 ----|  a message begins when both ends are
            ready_s: rank 2 comes late                       there

    a message takes     its links' latencies
                        + overhead_s times the messages of the busier of its two ends
                        + the longest, over its links, of (bytes of this round on it) / bandwidth
    then                reduce_s_per_byte times the bytes that its destination adds in this round

Messages of one round share links as if they were under way together, which is exact where they are;
messages of different rounds do not disturb one another. On the flat topology that is the closed
formula of every member (tests/collectives/test_cost.py).
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
    """What an operation takes."""

    seconds: float  # until the last rank is done, from 0
    done_s: tuple[float, ...]  # each rank
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
    """Runs the schedule in virtual time.

    Args:
        size_bytes: the whole buffer; of an all-to-all what one rank begins with.
        ready_s: when each rank comes to it; all at 0 where nothing is said.

    Raises:
        ConfigError: topology, schedule and times are not for equally many ranks.
    """
    size = collective.num_ranks
    collective = collective.for_size(size_bytes)
    if topology.num_ranks != size:
        raise ConfigError(
            f"{topology.name} has {topology.num_ranks} ranks, and {collective} {size}"
        )
    if ready_s and len(ready_s) != size:
        raise ConfigError(f"ready_s needs one time for each of {size} ranks, got {len(ready_s)}")
    now_s = list(ready_s) or [0.0] * size
    total = size * size_bytes if operation is Operation.ALL_TO_ALL else size_bytes
    chunk_bytes = [b - a for a, b in bounds(total, collective.num_chunks(operation))]
    sent_bytes, num_rounds = [0] * size, 0
    for transfers in collective.rounds(operation, root):
        lengths = [sum(chunk_bytes[chunk] for chunk in one.chunks) for one in transfers]
        for one, length in zip(transfers, lengths, strict=True):
            sent_bytes[one.source] += length
        _pass(topology, transfers, lengths, now_s, overhead_s, reduce_s_per_byte)
        num_rounds += 1
    return CollectiveCost(
        seconds=max(now_s),
        done_s=tuple(now_s),
        sent_bytes=tuple(sent_bytes),
        num_rounds=num_rounds,
    )


def _pass(
    topology: Topology,
    transfers: Round,
    lengths: list[int],
    now_s: list[float],
    overhead_s: float,
    reduce_s_per_byte: float,
) -> None:
    """One round; ``now_s``, when each rank is free, goes on."""
    ways = [topology.way(one.source, one.destination) for one in transfers]
    load: Counter[int] = Counter()
    sent, received = Counter[int](), Counter[int]()
    for one, way, length in zip(transfers, ways, lengths, strict=True):
        sent[one.source] += 1
        received[one.destination] += 1
        for link in way:
            load[link] += length
    done_s, added = list(now_s), Counter[int]()
    for one, way, length in zip(transfers, ways, lengths, strict=True):
        ends = (one.source, one.destination)
        links = [topology.links[place] for place in way]
        took_s = sum(link.latency_s for link in links)
        took_s += overhead_s * max(max(sent[end], received[end]) for end in ends)
        took_s += max(load[place] / topology.links[place].bytes_per_s for place in way)
        arrived_s = max(now_s[end] for end in ends) + took_s
        for end in ends:
            done_s[end] = max(done_s[end], arrived_s)
        if one.action is Action.REDUCE:
            added[one.destination] += length
    for rank, num_bytes in added.items():
        done_s[rank] += num_bytes * reduce_s_per_byte
    now_s[:] = done_s


def cost_between_equals(
    collective: Collective,
    operation: Operation,
    size_bytes: int,
    link: LinkCost,
    *,
    root: int = 0,
    ready_s: Sequence[float] = (),
) -> CollectiveCost:
    """`cost_on` the flat topology of this link; ``s_per_byte`` 0 is a link without a limit."""
    per_s = 1.0 / link.s_per_byte if link.s_per_byte else float("inf")
    return cost_on(
        flat(collective.num_ranks, latency_s=link.latency_s, bytes_per_s=per_s),
        collective,
        operation,
        size_bytes,
        root=root,
        overhead_s=link.overhead_s,
        reduce_s_per_byte=link.reduce_s_per_byte,
        ready_s=ready_s,
    )
