"""Run micro-batches forward and backward in the order of a schedule, where the loss is known.

    part 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3        inputs   of each worker -> part 0
    part 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..        targets  of each worker -> the last part
                                                  losses   the last part -> each worker, at the end

The last part computes the loss of each micro-batch, so its backward pass can start as soon as the
schedule (partition/schedules.py) says so, and fewer micro-batches are alive at a time. This module
must not know whose loss it is.

*Rejected:* the schedules of `torch.distributed.pipelining`, which run on groups registered with
torch by name (a script's ``destroy_process_group`` would end them), take all micro-batches from the
first worker's process and all targets from the last one's, and end with torch's own error where a
worker dies.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exchange.group import Pending
from ..partition.schedules import FORWARD, PipelineAction
from .borders import leaves_of
from .chunks import Chunk, TensorShape, Values
from .pipeline import INPUT, LOSS, TARGET, Incoming, PartRunner, arrived

KnownLoss = Callable[[Any, Tensor], Tensor]
"""(outputs in the model's form, targets) -> the mean loss over their rows."""
_Kept = dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]]
"""Inputs and outputs of each part and micro-batch that is alive; the last part keeps its loss."""


class KnownLosses(NamedTuple):
    """What the last part needs to compute losses.

    Attributes:
        target: type and shape of targets.
        weights: weight of each chunk in the update.
        parts_of_own: weight of each chunk in its own worker's loss.
    """

    loss: KnownLoss
    target: TensorShape
    weights: Sequence[float]
    parts_of_own: Sequence[float]


class ScheduledRunner(PartRunner):
    """Runs one worker's parts, forward and backward by a schedule."""

    _kept: _Kept
    _outgoing: dict[tuple[int, int], list[tuple[Pending, Tensor]]]

    def train(
        self,
        chunks: list[Chunk],
        own_inputs: Values,
        own_targets: Values,
        actions: Iterable[PipelineAction],
        known: KnownLosses,
    ) -> float:
        """Run all micro-batches forward and backward in the schedule's order.

        Args:
            chunks: micro-batches of all workers.
            own_inputs, own_targets: inputs and targets of this worker's chunks.
            actions: the schedule of all workers.

        Returns:
            The mean loss of this worker's chunks.
        """
        for chunk in self._own_chunks(chunks):
            if self.here:
                self._send(own_inputs[chunk.number], 0, INPUT)
            if self.here != self._end:
                self._send(own_targets[chunk.number], self._end, TARGET)
        own_actions = [action for action in actions if action.rank == self.here]
        arrivals = _Arrivals(self, chunks, own_inputs, own_targets, known.target)
        for action in own_actions:
            arrivals.expect(action)
        self._kept, self._outgoing = {}, {}
        losses = [0.0] * self._group.size
        with self._late.kept():
            for action in own_actions:
                if action.kind == FORWARD:
                    number = action.micro_batch
                    loss = self._step_forward(action, chunks[number], arrivals, known.loss)
                    losses[chunks[number].owner] += loss * known.parts_of_own[number]
                else:
                    self._step_back(action, arrivals, known.weights)
        self._add_late()
        return self._share_losses(chunks, losses)

    def _step_forward(
        self, action: PipelineAction, chunk: Chunk, arrivals: "_Arrivals", loss: KnownLoss
    ) -> float:
        """Compute a forward action; return the loss in the last part, otherwise 0."""
        part, number = action.stage, action.micro_batch
        entering = self._entering(part, arrivals.take(action), keeps=True)
        outputs = self._compute(part, entering, chunk.owner)
        if part < self.last:
            self._kept[part, number] = entering, (leaving := leaves_of(outputs))
            before = len(self._sent)
            self._pass_on(chunk, part, leaving, {})
            self._outgoing[part, number] = self._sent[before:]
            del self._sent[before:]
            return 0.0
        mean = loss(outputs, arrivals.target_of(number))
        self._kept[part, number] = entering, [mean]
        return float(mean.detach())

    def _step_back(
        self, action: PipelineAction, arrivals: "_Arrivals", weights: Sequence[float]
    ) -> None:
        """Compute a backward action; its forward message has arrived, since its gradient has."""
        part, number = action.stage, action.micro_batch
        entering, leaving = self._kept.pop((part, number))
        if part < self.last:
            gradients = arrived(arrivals.take(action))
            for pending, _ in self._outgoing.pop((part, number)):
                pending.wait()
            self._go_back(part, entering, leaving, gradients)
            return
        self._compute_back(leaving, [torch.full_like(leaving[0], weights[number])])
        self._send_back(part, entering)

    def _share_losses(self, chunks: Sequence[Chunk], losses: Sequence[float]) -> float:
        """Send each worker its loss from the last part; return this worker's."""
        own_loss = torch.zeros(1, dtype=torch.float64)
        owners = {chunk.owner for chunk in chunks}
        if self.here == self._end:
            for owner in owners - {self.here}:
                self._send([torch.tensor([losses[owner]], dtype=torch.float64)], owner, LOSS)
            own_loss[0] = losses[self.here]
        elif self.here in owners:
            self._group.begin_receive(own_loss, self._end, LOSS).wait()
        self._finish()
        return float(own_loss)


class _Arrivals:
    """What this worker's actions receive from other workers.

    All receives are posted before the first action: between machines, a receive that is posted to
    gloo while another message arrives waits for that message (4 MB between processes: 5 ms). So a
    border's tensors are held here for every micro-batch, and the activations computed from them
    only for as many as the schedule has alive.
    """

    def __init__(
        self,
        runner: PartRunner,
        chunks: Sequence[Chunk],
        own_inputs: Values,
        own_targets: Values,
        target: TensorShape,
    ) -> None:
        self._runner, self._chunks, self._own_inputs = runner, chunks, own_inputs
        self._own_targets, self._target = own_targets, target
        self._tensors: dict[PipelineAction, Sequence[Tensor] | Incoming] = {}
        self._chunk_targets: dict[int, Sequence[Tensor] | Incoming] = {}

    def expect(self, action: PipelineAction) -> None:
        """Begin to receive what an action needs."""
        runner, chunk = self._runner, self._chunks[action.micro_batch]
        is_last = action.stage == runner.last
        if action.kind == FORWARD:
            self._tensors[action] = runner.inputs_of(chunk, action.stage, self._own_inputs)
            if is_last:
                self._chunk_targets[action.micro_batch] = self._expect_target(chunk)
        elif not is_last:
            self._tensors[action] = runner.gradients_of(chunk, action.stage, {})

    def take(self, action: PipelineAction) -> Sequence[Tensor] | Incoming:
        """Return what an action needs, and keep it no longer."""
        return self._tensors.pop(action)

    def _expect_target(self, chunk: Chunk) -> Sequence[Tensor] | Incoming:
        if chunk.owner == self._runner.here:
            return self._own_targets[chunk.number]
        return self._runner.expect([self._target.empty(chunk.rows)], chunk.owner, TARGET)

    def target_of(self, number: int) -> Tensor:
        """Wait for the targets of a micro-batch."""
        return arrived(self._chunk_targets.pop(number))[0]
