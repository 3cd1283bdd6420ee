"""Group the workers that hold one copy of a model together, and those that hold the same part.

    2x2      copy      part 0    part 1
             workers   0         1          one copy: a pipeline flows through it
                       2         3          the other copy
                       twins     twins      sum their gradients

A worker's number in a group counts from 0: in a copy it is the number of its part. This module must
not know what is sent.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its stubs

from ..collectives.base import LinkCost
from ..exchange.group import MemberGroup, PeerGroup, Pending
from ..partition.names import SplitName

_MEASURED_MESSAGES = ((64, 16), (1 << 22, 2))
"""Sizes in bytes, and the number of round trips in one mean."""
_NUM_MEANS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How the workers of a run reach each other, as an engine gives it.

    Attributes:
        everyone: the group of all workers, by their seats.
        part: makes a group of some workers under a unique name; each of them must call it.
        near: makes the processes of a group map each other's memory, if all are on one machine;
            each of them must call it.
        words: opens a connection for short requests to any worker.
        share: begins to broadcast the first worker's bytes to all.
    """

    everyone: MemberGroup
    part: Callable[[str, Sequence[int]], PeerGroup]
    near: Callable[[PeerGroup], PeerGroup]
    words: Callable[[], Store]
    share: Callable[[Tensor], Pending]


class SplitGroups:
    """The groups of one worker.

    Args:
        ranks: all workers of the run.
        name: how the model is divided.
        order: a copy's workers in the order of their parts; empty: as they are numbered.
    """

    def __init__(self, ranks: Ranks, name: SplitName, order: Sequence[int] = ()) -> None:
        self.ranks, self.name = ranks, name
        self.seat = ranks.everyone.rank
        members, twins = name.copy_of(self.seat), name.twins_of(self.seat)
        self.members = tuple(members[number] for number in order) if order else members
        self.copy = ranks.near(ranks.part(f"copy {members[0]}", self.members))
        """The workers of this copy."""
        self.twins: PeerGroup | None = None
        """The workers that hold the same part; None: there is one copy."""
        if name.copies > 1:
            self.twins = ranks.near(ranks.part(f"twins {twins[0]}", twins))
        self.asks = ranks.part(f"asks {members[0]}", self.members)
        """The workers of this copy again, for threads that hand out parts."""

    @property
    def part(self) -> int:
        """The number of this worker's part."""
        return self.copy.rank


def measured_link(group: PeerGroup) -> LinkCost:
    """Measure a message from one worker to another: half a round trip between the first two.

    All workers of the group call it; all but these two get 0.
    """
    times_s = []
    for num_bytes, num_calls in _MEASURED_MESSAGES:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        means_s = []
        for _ in range(1 + _NUM_MEANS if group.rank < 2 else 0):
            start_s = time.perf_counter()
            for call in range(2 * num_calls):
                begin = group.begin_send if group.rank == call % 2 else group.begin_receive
                begin(buffer, 1 - group.rank, 0).wait()
            means_s.append((time.perf_counter() - start_s) / (2 * num_calls))
        times_s.append(statistics.median(means_s[1:] or [0.0]))
    (small, _), (large, _) = _MEASURED_MESSAGES
    slope = max(0.0, times_s[1] - times_s[0]) / (large - small)
    return LinkCost(latency_s=times_s[0], s_per_byte=slope)


def tell_all(group: MemberGroup, value: Any) -> list[Any]:
    """Exchange a value of plain data with the group; return all workers' values, by number."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather(torch.tensor([len(text)]), sizes).wait()
    most = int(sizes.max())
    padded, gathered = torch.zeros(most, dtype=torch.uint8), torch.zeros(most * group.size).byte()
    padded[: len(text)] = text
    group.all_gather(padded, gathered).wait()
    rows = gathered.view(group.size, most)
    return [
        json.loads(bytes(row[:size].tolist()))
        for row, size in zip(rows, sizes.tolist(), strict=True)
    ]
