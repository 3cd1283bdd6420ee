"""Send micro-batches through the parts of a model, and their gradients back.

    part 0   F0 F1 F2 F3 ............ B0 B1 B2 B3        forward: when the scripts call the model
    part 1      F0 F1 F2 F3 ..... B0 B1 B2 B3            backward: when they call backward()

    inputs   of each worker -> part 0         outputs     last part -> each worker
    border   part k -> part k + 1             gradients   all of these the other way

This is the order if a script's loss comes between forward and backward (gpipe: Y. Huang et al.,
"GPipe", 2019, section 2.2); scheduled.py starts backward passes earlier, where the loss is known.
If a worker has several parts, they are k, k + P, ... for P workers. Micro-batches of all workers
take turns, so that no worker gets all of its outputs last. A part keeps what its backward pass
needs. This module must not know what a loss is.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..exchange.group import PeerGroup, Pending
from ..splits.late_weights import LateWeights
from .batch_norm import NormStatistics
from .borders import leaves_of
from .chunks import Chunk, TensorShape, Values

INPUT, TARGET, LOSS, _OUTPUT, _OUTPUT_GRAD, _BORDERS = range(6)
"""Tags of messages, so that messages of one kind between two workers do not wait for another kind.
From ``_BORDERS`` on there are two tags for each border, forward and back."""


@dataclass(slots=True)
class Passed:
    """A forward pass that a backward pass may follow.

    Attributes:
        kept: inputs and outputs of each of this worker's parts, for each chunk; empty: the backward
            pass is over.
    """

    chunks: list[Chunk]
    kept: list[list[tuple[list[Tensor], list[Tensor]]]] = field(default_factory=list)


class PartRunner:
    """Runs one worker's parts.

    Args:
        modules: modules of its parts. Each takes what crosses the border before it and returns what
            crosses the border after it; the first part has the worker's number in its copy.
        group: the workers of the copy.
        borders: what crosses each border: inputs, ..., outputs.
        norms: running statistics of the copy's batch norm layers.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: PeerGroup,
        borders: Sequence[Sequence[TensorShape]],
        norms: NormStatistics,
    ) -> None:
        self._modules, self._group, self._borders, self._norms = modules, group, borders, norms
        self.here, self._end = group.rank, group.size - 1
        self.last = len(borders) - 2
        self._parts = range(self.here, self.last + 1, group.size)
        self._late = LateWeights(modules)
        self._sent: list[tuple[Pending, Tensor]] = []
        self.used: Sequence[Sequence[int]] = ()
        """The numbers of the tensors of each border that get gradients in the current pass
        (`borders.used_tensors`)."""
        self.busy_s = 0.0
        """Seconds of computing, forward and backward, since it was set to 0."""

    def forward(
        self, chunks: list[Chunk], own_inputs: Values, *, keeps: bool
    ) -> tuple[dict[int, list[Tensor]], Passed | None]:
        """Compute all micro-batches through these parts; return the outputs of this worker's own.

        Args:
            chunks: micro-batches of all workers.
            own_inputs: inputs of this worker's micro-batches.
            keeps: whether a backward pass may follow.

        Returns:
            The outputs, by the micro-batches' numbers, and the pass if ``keeps``.
        """
        passed = Passed(chunks) if keeps else None
        inputs = [self.inputs_of(chunk, self.here, own_inputs) for chunk in chunks]
        outputs: dict[int, Sequence[Tensor] | Incoming] = {}
        for chunk in self._own_chunks(chunks):
            if self.here:
                self._send(own_inputs[chunk.number], 0, INPUT)
            if self.here != self._end:
                buffers = [shape.empty(chunk.rows) for shape in self._borders[-1]]
                outputs[chunk.number] = self.expect(buffers, self._end, _OUTPUT)
        with torch.set_grad_enabled(keeps), self._late.kept():
            for part in self._parts:
                if part != self.here:
                    inputs = [self.inputs_of(chunk, part, own_inputs) for chunk in chunks]
                kept = []
                for at, chunk in enumerate(chunks):
                    entering = self._entering(part, inputs[at], keeps=keeps)
                    inputs[at] = ()
                    leaving = leaves_of(self._compute(part, entering, chunk.owner))
                    if keeps:
                        kept.append((entering, leaving))
                    self._pass_on(chunk, part, leaving, outputs)
                if passed is not None:
                    passed.kept.append(kept)
        own_outputs = {number: arrived(tensors) for number, tensors in outputs.items()}
        self._finish()
        return own_outputs, passed

    def _own_chunks(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return [chunk for chunk in chunks if chunk.owner == self.here]

    def inputs_of(
        self, chunk: Chunk, part: int, own_inputs: Values
    ) -> "Sequence[Tensor] | Incoming":
        """Return a part's inputs for a micro-batch, or begin to receive them."""
        if part == 0 and chunk.owner == 0:
            return own_inputs[chunk.number]
        source, tag = (chunk.owner, INPUT) if part == 0 else (self._worker(part - 1), _tag(part))
        return self.expect([shape.empty(chunk.rows) for shape in self._borders[part]], source, tag)

    def _worker(self, part: int) -> int:
        return part % self._group.size

    def _entering(
        self, part: int, inputs: "Sequence[Tensor] | Incoming", *, keeps: bool
    ) -> list[Tensor]:
        """Wait for a part's inputs; if ``keeps``, they get gradients, but for the model's own."""
        entering = arrived(inputs)
        if keeps and part:
            entering = [x.requires_grad_(x.is_floating_point() or x.is_complex()) for x in entering]
        return entering

    def _compute(self, part: int, entering: Sequence[Tensor], owner: int) -> Any:
        start_s = time.perf_counter()
        with self._norms.of(owner):
            outputs = self._modules[part // self._group.size](*entering)
        self.busy_s += time.perf_counter() - start_s
        return outputs

    def _pass_on(
        self,
        chunk: Chunk,
        part: int,
        results: Sequence[Tensor],
        outputs: "dict[int, Sequence[Tensor] | Incoming]",
    ) -> None:
        """Send a part's results to the next part, or the last part's to the chunk's owner."""
        refuse_other_sizes(results, self._borders[part + 1], chunk.rows)
        leaving = [tensor.detach() for tensor in results]
        if part < self.last:
            self._send(leaving, self._worker(part + 1), _tag(part + 1))
        elif chunk.owner == self.here:
            outputs[chunk.number] = leaving
        else:
            self._send(leaving, chunk.owner, _OUTPUT)

    def backward(self, passed: Passed, own_gradients: Values) -> None:
        """Compute the gradients of all micro-batches, and add them up in these parts.

        Args:
            own_gradients: gradients of those outputs of this worker's chunks that are ``used``.
        """
        if self.here != self._end:
            for chunk in self._own_chunks(passed.chunks):
                self._send(own_gradients[chunk.number], self._end, _OUTPUT_GRAD)
        for part in reversed(self._parts):
            incoming = [self.gradients_of(chunk, part, own_gradients) for chunk in passed.chunks]
            kept = passed.kept.pop()
            for at in range(len(passed.chunks)):
                entering, leaving = kept[at]
                kept[at] = ([], [])
                gradients, incoming[at] = arrived(incoming[at]), ()
                self._go_back(part, entering, leaving, gradients)
        self._add_late()
        self._finish()

    def _go_back(
        self,
        part: int,
        entering: Sequence[Tensor],
        leaving: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        """Take one micro-batch back through a part, and send its inputs' gradients on.

        Args:
            gradients: of those of its outputs that are used.
        """
        pairs = [
            (leaving[number], gradient)
            for number, gradient in zip(self.used[part + 1], gradients, strict=True)
            if leaving[number].requires_grad
        ]
        if pairs:
            self._compute_back(*zip(*pairs, strict=True))
        self._send_back(part, entering)

    def _compute_back(self, leaving: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        start_s = time.perf_counter()
        torch.autograd.backward(leaving, gradients)
        self.busy_s += time.perf_counter() - start_s

    def _add_late(self) -> None:
        """Add the late gradients of weights, for which no other worker has waited."""
        start_s = time.perf_counter()
        self._late.add()
        self.busy_s += time.perf_counter() - start_s

    def _send_back(self, part: int, entering: Sequence[Tensor]) -> None:
        """Send the gradients of a part's used inputs to the part before it."""
        if part:
            used = [entering[number] for number in self.used[part]]
            gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in used]
            self._send(gradients, self._worker(part - 1), _back_tag(part))

    def gradients_of(
        self, chunk: Chunk, part: int, own_gradients: Values
    ) -> "Sequence[Tensor] | Incoming":
        """Return the gradients of a part's outputs for a micro-batch, or begin to receive them."""
        is_last = part == self.last
        if is_last and chunk.owner == self.here:
            return own_gradients[chunk.number]
        source, tag = (
            (chunk.owner, _OUTPUT_GRAD)
            if is_last
            else (self._worker(part + 1), _back_tag(part + 1))
        )
        shapes = self._borders[part + 1]
        buffers = [shapes[number].empty(chunk.rows) for number in self.used[part + 1]]
        return self.expect(buffers, source, tag)

    # -- messages -------------------------------------------------------------------------------

    def _send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        for tensor in tensors:
            message = tensor.contiguous()
            self._sent.append((self._group.begin_send(message, peer, tag), message))

    def expect(self, buffers: list[Tensor], peer: int, tag: int) -> "Incoming":
        """Begin to receive tensors into buffers."""
        pending = [self._group.begin_receive(buffer, peer, tag) for buffer in buffers]
        return Incoming(buffers, pending)

    def _finish(self) -> None:
        """Wait until all messages have been sent."""
        for pending, _ in self._sent:
            pending.wait()
        self._sent.clear()


class Incoming(NamedTuple):
    """Tensors on their way here, while other work is done."""

    buffers: list[Tensor]
    pending: list[Pending]


def arrived(tensors: Sequence[Tensor] | Incoming) -> list[Tensor]:
    """Return tensors once they have arrived."""
    if not isinstance(tensors, Incoming):
        return list(tensors)
    for pending in tensors.pending:
        pending.wait()
    return tensors.buffers


def refuse_other_sizes(tensors: Sequence[Tensor], shapes: Sequence[TensorShape], rows: int) -> None:
    """Raise ConfigError where a part's outputs are not those that the next worker expects."""
    if len(tensors) != len(shapes) or not all(
        shape.is_of(tensor, rows) for tensor, shape in zip(tensors, shapes, strict=True)
    ):
        raise ConfigError(
            f"a part of the model returns {[list(tensor.shape) for tensor in tensors]} for {rows} "
            f"samples, but by the first batch it should be "
            f"{[list(shape.empty(rows).shape) for shape in shapes]}: sizes "
            "that depend on the data cannot cross a split model's borders; use --split data or "
            "shard"
        )


def _tag(border: int) -> int:
    """Return the tag of messages that cross a border forward."""
    return _BORDERS + 2 * border


def _back_tag(border: int) -> int:
    """Return the tag of gradients that cross a border back."""
    return _BORDERS + 2 * border + 1
