"""Micro-batches there and back in the order of a schedule, where the loss is known.

    part 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3        inputs   of each worker -> part 0
    part 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..        targets  of each worker -> the last part
                                                  losses   the last part -> each worker, at the end

The last part computes the loss of each micro-batch, so each can go back as soon as the schedule
(partition/schedules.py) says so, and fewer are alive at a time. This module must not know whose
loss it is.

*Rejected:* the schedules of `torch.distributed.pipelining`, which run on groups that torch knows by
name (a script's ``destroy_process_group`` would end them), take all micro-batches from the first
worker's process and all targets from the last one's, and end with torch's own words where one dies.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exchange.group import Pending
from ..partition.schedules import FORWARD, PipelineAction
from .borders import leaves_of
from .chunks import Chunk, TensorShape, Values
from .pipeline import INPUT, LOSS, TARGET, Incoming, PartRunner, there

KnownLoss = Callable[[Any, Tensor], Tensor]
"""(outputs as the model gives them, targets) -> the mean over their rows."""
_Kept = dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]]
"""Of each part and micro-batch that is alive, what it was given and made; of the last, its loss."""


class KnownLosses(NamedTuple):
    """What the last part needs to compute losses.

    Attributes:
        target: what targets are.
        weights: of each chunk in the update.
        parts_of_own: of each chunk in its own worker's loss.
    """

    loss: KnownLoss
    target: TensorShape
    weights: Sequence[float]
    parts_of_own: Sequence[float]


class ScheduledRunner(PartRunner):
    """One worker's parts, which also go back by a schedule."""

    _kept: _Kept
    _given: dict[tuple[int, int], list[tuple[Pending, Tensor]]]

    def train(
        self,
        chunks: list[Chunk],
        own: Values,
        targets: Values,
        actions: Iterable[PipelineAction],
        known: KnownLosses,
    ) -> float:
        """All micro-batches there and back, in the schedule's order; this worker's mean loss.

        Args:
            own, targets: of this worker's chunks.
        """
        for one in self._mine(chunks):
            if self.here:
                self._send(own[one.number], 0, INPUT)
            if self.here != self._end:
                self._send(targets[one.number], self._end, TARGET)
        due = [one for one in actions if one.rank == self.here]
        coming = _Coming(self, chunks, own, targets, known.target)
        for action in due:
            coming.expect(action)
        self._kept, self._given = {}, {}
        losses = [0.0] * self._group.size
        with self._late.kept():
            for action in due:
                if action.kind == FORWARD:
                    number = action.micro_batch
                    found = self._go_on(action, chunks[number], coming, known.loss)
                    losses[chunks[number].owner] += found * known.parts_of_own[number]
                else:
                    self._return(action, coming, known.weights)
        self._add_late()
        return self._share_losses(chunks, losses)

    def _go_on(
        self, action: PipelineAction, one: Chunk, coming: "_Coming", loss: KnownLoss
    ) -> float:
        """Forward; the loss, where this is the last part."""
        part, number = action.stage, action.micro_batch
        entering = self._entering(part, coming.take(action), keeps=True)
        made = self._compute(part, entering)
        if part < self.last:
            self._kept[part, number] = entering, (found := leaves_of(made))
            before = len(self._sent)
            self._give(one, part, found, {})
            self._given[part, number] = self._sent[before:]
            del self._sent[before:]
            return 0.0
        mean = loss(made, coming.target_of(number))
        self._kept[part, number] = entering, [mean]
        return float(mean.detach())

    def _return(self, action: PipelineAction, coming: "_Coming", weights: Sequence[float]) -> None:
        """Backward; what was sent on has arrived, since its gradient has."""
        part, number = action.stage, action.micro_batch
        given, made = self._kept.pop((part, number))
        if part < self.last:
            gradients = there(coming.take(action))
            for pending, _ in self._given.pop((part, number)):
                pending.wait()
            self._go_back(part, given, made, gradients)
            return
        self._compute_back(made, [torch.full_like(made[0], weights[number])])
        self._give_back(part, given)

    def _share_losses(self, chunks: Sequence[Chunk], losses: Sequence[float]) -> float:
        """Each worker is told its own."""
        found = torch.zeros(1, dtype=torch.float64)
        owners = {one.owner for one in chunks}
        if self.here == self._end:
            for owner in owners - {self.here}:
                self._send([torch.tensor([losses[owner]], dtype=torch.float64)], owner, LOSS)
            found[0] = losses[self.here]
        elif self.here in owners:
            self._group.begin_receive(found, self._end, LOSS).wait()
        self._finish()
        return float(found)


class _Coming:
    """What this worker's actions need of others.

    Room is made for all before the first: who asks gloo for a message while another one arrives
    waits for that (4 MB between processes: 5 ms). So what crosses a border lies here once for each
    micro-batch, and what is computed of it for as many as the schedule has alive.
    """

    def __init__(
        self,
        runner: PartRunner,
        chunks: Sequence[Chunk],
        own: Values,
        targets: Values,
        target: TensorShape,
    ) -> None:
        self._runner, self._chunks, self._own = runner, chunks, own
        self._targets, self._target = targets, target
        self._found: dict[PipelineAction, Sequence[Tensor] | Incoming] = {}
        self._expected: dict[int, Sequence[Tensor] | Incoming] = {}

    def expect(self, action: PipelineAction) -> None:
        """Room for what it needs."""
        runner, one = self._runner, self._chunks[action.micro_batch]
        is_last = action.stage == runner.last
        if action.kind == FORWARD:
            self._found[action] = runner.given_of(one, action.stage, self._own)
            if is_last:
                self._expected[action.micro_batch] = self._target_coming(one)
        elif not is_last:
            self._found[action] = runner.gradients_of(one, action.stage, {})

    def take(self, action: PipelineAction) -> Sequence[Tensor] | Incoming:
        return self._found.pop(action)

    def _target_coming(self, one: Chunk) -> Sequence[Tensor] | Incoming:
        if one.owner == self._runner.here:
            return self._targets[one.number]
        return self._runner.expect([self._target.empty(one.rows)], one.owner, TARGET)

    def target_of(self, number: int) -> Tensor:
        return there(self._expected.pop(number))[0]
