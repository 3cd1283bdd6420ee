"""Announce what each worker of a copy is about to do, before any of them does it.

    worker 0   FORWARD | FORWARD | BACKWARD | STEP_END
    worker 1   FORWARD | FORWARD | BACKWARD | STEP_END        all the same: they do it

    worker 0   FORWARD  | FORWARD  | STEP_END                 worker 1 has no mini-batch left, and
    worker 1   STEP_END | STEP_END | STEP_END                 computes its part

    worker 0   LOOK     | FORWARD                             a look changes nothing, so it comes
    worker 1   FORWARD  | FORWARD                             first, and all compute their parts

So no two workers can wait for different things. The decision is a pure function of the intents that
were shown (`decide`). This module must not know models.
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
    """What a worker is about to do."""

    STEP_END = 0
    """It pushes, or its epoch or evaluation is over; it serves others until all are here."""
    FORWARD = 1
    LOOK = 2
    """A forward pass without gradients."""
    BACKWARD = 3
    TRAIN = 4
    """Forward and backward by a schedule, where the loss is known."""


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
    """What a worker announces, as whole numbers.

    Attributes:
        number: BACKWARD: the number of the forward pass; STEP_END: the reason, see `End`.
        rows: rows of its inputs; BACKWARD: which outputs have a gradient here, one bit each;
            STEP_END: whether parameters have gradients that did not come through ``model(x)``.
        samples: of its mini-batch, which weigh its gradient.
        mode: the mode of its modules, see `mode_of`.
        seed: of this pass's random numbers, where all workers draw the same; below 0: none are
            drawn. STEP_END: which buffers have changed here, one bit each.
        odd: index of the argument, targets last, whose rows have another size than the model was
            divided for; below 0: none has.
        odd_dim, odd_size: the first dimension of other size, and its size.
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
    """Return a number for which modules are in training: 0 none, 1 all, else a hash of the mix.

    Example:
        >>> mode_of([True, True]), mode_of([False, False]), mode_of([True, False]) > 1
        (1, 0, True)
    """
    row = bytes(flags)
    if len(set(row)) < 2:
        return int(any(row))
    return 2 + zlib.crc32(row)


class Meeting:
    """One worker's place in the meetings of its copy.

    Args:
        members: seats of the copy's workers, for messages.
    """

    def __init__(self, group: MemberGroup, members: Sequence[int]) -> None:
        self._group, self._members = group, tuple(members)
        self._gathered = torch.zeros(group.size * len(Intent._fields), dtype=torch.int64)

    def show(self, intent: Intent) -> list[Intent]:
        """Show this worker's intent to all, and return all intents, by the workers' numbers."""
        fields = torch.tensor([int(value) for value in intent])
        self._group.all_gather(fields, self._gathered).wait()
        rows = self._gathered.view(self._group.size, -1).tolist()
        return [Intent(PartTask(row[0]), *row[1:]) for row in rows]

    def decide(self, intents: Sequence[Intent]) -> PartTask:
        """Return what all workers do now; raise as `decide` does."""
        return decide(intents, self._members)


def decide(intents: Sequence[Intent], members: Sequence[int]) -> PartTask:
    """Return what all workers do now: STEP_END once all have reached it, for the same reason.

    Args:
        members: seats of the workers.

    Raises:
        ConfigError: two workers would do things that do not fit together.
    """
    busy = [(intent, seat) for intent, seat in zip(intents, members, strict=True) if intent.doing]
    for intent, seat in busy:
        if intent.odd >= 0:
            raise ConfigError(
                f"worker {seat} calls the model with a tensor, number {intent.odd} of its inputs, "
                f"of size {intent.odd_size} in dimension {intent.odd_dim}, but the model was split "
                "for the size of the first batch: pad to one size, or use --split data or shard"
            )
    if looking := [pair for pair in busy if pair[0].doing is PartTask.LOOK]:
        busy = looking
    if not busy:
        _refuse_other_ends(intents, members)
        return PartTask.STEP_END
    first, seat = busy[0]
    for intent, other in busy[1:]:
        if intent.doing is first.doing and (intent.number == first.number or intent.number < 0):
            continue
        here, there = _WORDS[first.doing], _WORDS[intent.doing]
        if here == there:
            here, there = f"{here} of its call {first.number}", f"of its call {intent.number}"
        raise ConfigError(
            f"worker {seat} {here} where worker {other} {there}: all workers compute a split model "
            "together, so each must call it, and backward(), equally often and in the same order"
        )
    for intent, other in busy[1:]:
        if intent.mode != first.mode:
            raise ConfigError(
                f"the model is in another mode on worker {seat} than on worker {other} "
                "(model.train(), model.eval()), but they compute it together: set the same mode in "
                "all"
            )
    return first.doing


def _refuse_other_ends(intents: Sequence[Intent], members: Sequence[int]) -> None:
    """Raise ConfigError where workers at a step's end would wait for different things."""
    for intent, seat in zip(intents, members, strict=True):
        if intent.number != intents[0].number:
            here, there = (_END_WORDS[End(end)] for end in (intents[0].number, intent.number))
            raise ConfigError(
                f"worker {members[0]} {here} where worker {seat} {there}: workers of a split model "
                "must do this together, so let all do it, not only one (if pace.is_main)"
            )
