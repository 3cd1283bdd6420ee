"""What each worker of a copy is about to do, said before any of them does it.

    worker 0   FORWARD | FORWARD | BACKWARD | STEP_END
    worker 1   FORWARD | FORWARD | BACKWARD | STEP_END        all the same: they do it

    worker 0   FORWARD  | FORWARD  | STEP_END                 worker 1 has no mini-batch left, and
    worker 1   STEP_END | STEP_END | STEP_END                 computes its part

    worker 0   LOOK     | FORWARD                             a look changes nothing, so it comes
    worker 1   FORWARD  | FORWARD                             first, and all compute their parts

So no two of them can wait for different things. What is decided is a function of what was said
(`decide`). This module must not know models.
"""

import zlib
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from ..errors import ConfigError
from ..exchange.base import End
from ..exchange.group import MemberGroup


class PartTask(IntEnum):
    """What a worker has come to."""

    STEP_END = 0
    """It pushes, or an epoch or evaluation is over for it: until all are here it serves."""
    FORWARD = 1
    LOOK = 2
    """A forward pass without gradients."""
    BACKWARD = 3
    TRAIN = 4
    """There and back by a schedule, where the loss is known."""


_WORDS = {
    PartTask.FORWARD: "calls the model",
    PartTask.LOOK: "calls the model without gradients",
    PartTask.BACKWARD: "is in backward()",
    PartTask.TRAIN: "trains on a mini-batch",
}


_END_WORDS = {
    End.PUSH: "is at the end of a step",
    End.EPOCH: "begins an epoch",
    End.EVALUATION: "waits in pace.evaluate()",
    End.SUM: "waits in pace.sum()",
    End.OVER: "is at the end of its script",
}


class Intent(NamedTuple):
    """What a worker says.

    Attributes:
        number: of the forward pass that a backward pass is of; at a step's end why, see `End`.
        rows: of its inputs; of a backward pass which outputs have a gradient here, a bit each; at a
            step's end whether its gradients are of more than the model's outputs.
        samples: of its mini-batch, by which its gradient is weighed.
        mode: of its modules, see `mode_of`.
        seed: of the random numbers of this pass, where all have the same; below 0: of none. At a
            step's end which buffers have changed here, a bit each.
        odd: which tensor it is called with has rows of another size than the model was divided for,
            its targets last; below 0: none.
        odd_dim, odd_size: the first dimension that is another, and how large it is.
    """

    doing: PartTask
    number: int = -1
    rows: int = 0
    samples: int = 0
    mode: int = -1
    seed: int = -1
    odd: int = -1
    odd_dim: int = 0
    odd_size: int = 0


def mode_of(flags: Iterable[bool]) -> int:
    """One number for which modules are in training: 0 none, 1 all, else another one for each mix.

    Example:
        >>> mode_of([True, True]), mode_of([False, False]), mode_of([True, False]) > 1
        (1, 0, True)
    """
    row = bytes(flags)
    if len(set(row)) < 2:
        return int(any(row))
    return 2 + zlib.crc32(row)


class Meeting:
    """One worker's place among those of its copy.

    Args:
        members: their seats, for messages.
    """

    def __init__(self, group: MemberGroup, members: Sequence[int]) -> None:
        self._group, self._members = group, tuple(members)
        self._every = torch.zeros(group.size * len(Intent._fields), dtype=torch.int64)

    def show(self, mine: Intent) -> list[Intent]:
        """What all have come to, by their numbers."""
        self._group.all_gather(torch.tensor([int(one) for one in mine]), self._every).wait()
        rows = self._every.view(self._group.size, -1).tolist()
        return [Intent(PartTask(row[0]), *row[1:]) for row in rows]

    def decide(self, every: Sequence[Intent]) -> PartTask:
        """What all do now.

        Raises:
            ConfigError: two have come to different things.
        """
        return decide(every, self._members)


def decide(every: Sequence[Intent], members: Sequence[int]) -> PartTask:
    """What all do now: STEP_END where all are there, for one reason.

    Args:
        members: their seats.

    Raises:
        ConfigError: two have come to different things.
    """
    busy = [(one, seat) for one, seat in zip(every, members, strict=True) if one.doing]
    for one, seat in busy:
        if one.odd >= 0:
            raise ConfigError(
                f"worker {seat} calls the model with a tensor, number {one.odd} of what it is "
                f"given, of size {one.odd_size} in dimension {one.odd_dim}, and a split model was "
                "divided for another one, that of the first batch: pad to one size, or use "
                "--split data or shard"
            )
    if looking := [pair for pair in busy if pair[0].doing is PartTask.LOOK]:
        busy = looking
    if not busy:
        _refuse_other_ends(every, members)
        return PartTask.STEP_END
    first, seat = busy[0]
    for one, other in busy[1:]:
        if one.doing is first.doing and (one.number == first.number or one.number < 0):
            continue
        here, there = _WORDS[first.doing], _WORDS[one.doing]
        if here == there:
            here, there = f"{here} of its call {first.number}", f"of its call {one.number}"
        raise ConfigError(
            f"worker {seat} {here} where worker {other} {there}: a split model is computed by all "
            "workers together, so each calls it, and backward(), as often and in the same order"
        )
    for one, other in busy[1:]:
        if one.mode != first.mode:
            raise ConfigError(
                f"the model is in another mode on worker {seat} than on worker {other} "
                "(model.train(), model.eval()), and they compute it together: set it in all alike"
            )
    return first.doing


def _refuse_other_ends(every: Sequence[Intent], members: Sequence[int]) -> None:
    """Raise ConfigError where these would wait for different things from now on."""
    for one, seat in zip(every, members, strict=True):
        if one.number != every[0].number:
            here, there = (_END_WORDS[End(found)] for found in (every[0].number, one.number))
            raise ConfigError(
                f"worker {members[0]} {here} where worker {seat} {there}: workers of a split model "
                "come to these together, so let all do it, not one alone (if pace.is_main)"
            )
