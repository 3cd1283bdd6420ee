"""Those who hold one copy of a model together, and those who hold the same part of it.

    2x2      copy      part 0    part 1
             workers   0         1          one copy: what a pipeline flows through
                       2         3          the other
                       twins     twins      gradients are summed

A number in a group counts its workers from 0: in a copy it is the part. This module must not know
what is sent.
"""

import abc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its stubs

from ..exchange.group import MemberGroup, Pending
from ..partition.names import SplitName


class PeerGroup(MemberGroup):
    """A group whose workers also send to each other."""

    @abc.abstractmethod
    def begin_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """A message on its way; ``tensor``, contiguous, stays as it is until it has left."""

    @abc.abstractmethod
    def begin_receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Room for what comes; messages of one tag from one peer arrive in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How the workers of a run reach each other, as an engine gives it.

    Attributes:
        everyone: all of them, by their seats.
        part: a group of these, by a name that no other one has; all of them make it.
        words: a connection for words to whoever listens.
        share: the first worker's bytes become everyone's.
    """

    everyone: MemberGroup
    part: Callable[[str, Sequence[int]], PeerGroup]
    words: Callable[[], Store]
    share: Callable[[Tensor], Pending]


class SplitGroups:
    """The groups of one worker.

    Args:
        ranks: of the run.
        name: how the model is divided.
        order: of a copy's workers, whose part comes first; none: as they are numbered.
    """

    def __init__(self, ranks: Ranks, name: SplitName, order: Sequence[int] = ()) -> None:
        self.ranks, self.name = ranks, name
        self.seat = ranks.everyone.rank
        members, twins = name.copy_of(self.seat), name.twins_of(self.seat)
        self.members = tuple(members[number] for number in order) if order else members
        self.copy = ranks.part(f"copy {members[0]}", self.members)
        """Those of this copy."""
        self.twins = ranks.part(f"twins {twins[0]}", twins) if name.copies > 1 else None
        """Those who hold the same part; None: there is one copy."""
        self.asks = ranks.part(f"asks {members[0]}", self.members)
        """Those of this copy once more, for threads that hand out parts."""

    @property
    def part(self) -> int:
        """The number of this worker's part."""
        return self.copy.rank


def tell_all(group: MemberGroup, value: Any) -> list[Any]:
    """What all say, by number, as plain data."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather(torch.tensor([len(text)]), sizes).wait()
    most = int(sizes.max())
    mine, every = torch.zeros(most, dtype=torch.uint8), torch.zeros(most * group.size).byte()
    mine[: len(text)] = text
    group.all_gather(mine, every).wait()
    rows = every.view(group.size, most)
    return [
        json.loads(bytes(row[:size].tolist()))
        for row, size in zip(rows, sizes.tolist(), strict=True)
    ]
