"""Micro-batches through the parts of a model, and their gradients back.

    part 0   F0 F1 F2 F3 ............ B0 B1 B2 B3        forward: when the scripts call the model
    part 1      F0 F1 F2 F3 ..... B0 B1 B2 B3            backward: when they call backward()

    inputs   of each worker -> part 0         outputs     last part -> each worker
    border   part k -> part k + 1             gradients   all of it the other way

So it is where a script's loss stands between the two (gpipe: Y. Huang et al., "GPipe", 2019,
section 2.2); scheduled.py goes back earlier, where the loss is known. Where a worker has several
parts, they are k, k + P, ... of P workers. Micro-batches of all workers take turns, so that
nobody's outputs come last. What a part needs for its backward pass it keeps. This module must not
know what a loss is.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..exchange.group import Pending
from ..splits.late_weights import LateWeights
from .borders import leaves_of
from .chunks import Chunk, TensorShape, Values
from .group import PeerGroup

INPUT, TARGET, LOSS, _OUTPUT, _OUTPUT_GRAD, _BORDERS = range(6)
"""Tags: of two kinds of messages between the same two workers neither waits for the other. From the
last one on there are two for each border, there and back."""


@dataclass(slots=True)
class Passed:
    """A forward pass that a backward pass may follow.

    Attributes:
        kept: of each of this worker's parts, and each chunk, what it was given and made; empty: the
            backward pass is over.
    """

    chunks: list[Chunk]
    kept: list[list[tuple[list[Tensor], list[Tensor]]]] = field(default_factory=list)


class PartRunner:
    """One worker's parts.

    Args:
        modules: of its parts, each of which takes what crosses the border before it and gives what
            crosses the one behind it; the first is as the worker is numbered.
        borders: what crosses each: inputs, ..., outputs.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: PeerGroup,
        borders: Sequence[Sequence[TensorShape]],
    ) -> None:
        self._modules, self._group, self._borders = modules, group, borders
        self.here, self._end = group.rank, group.size - 1
        self.last = len(borders) - 2
        self._parts = range(self.here, self.last + 1, group.size)
        self._late = LateWeights(modules)
        self._sent: list[tuple[Pending, Tensor]] = []
        self.used: Sequence[Sequence[int]] = ()
        """Which tensors of each border get gradients, by their numbers, in the pass that is under
        way (`borders.used_tensors`)."""
        self.busy_s = 0.0
        """Of computing, forward and backward, since it was set to 0."""

    def forward(
        self, chunks: list[Chunk], own: Values, *, keeps: bool
    ) -> tuple[dict[int, list[Tensor]], Passed | None]:
        """All micro-batches through these parts; the outputs of those that are this worker's.

        Args:
            keeps: a backward pass may follow.
        """
        passed = Passed(chunks) if keeps else None
        given = [self.given_of(one, self.here, own) for one in chunks]
        outputs: dict[int, Sequence[Tensor] | Incoming] = {}
        for one in self._mine(chunks):
            if self.here:
                self._send(own[one.number], 0, INPUT)
            if self.here != self._end:
                rooms = [shape.empty(one.rows) for shape in self._borders[-1]]
                outputs[one.number] = self.expect(rooms, self._end, _OUTPUT)
        with torch.set_grad_enabled(keeps), self._late.kept():
            for part in self._parts:
                if part != self.here:
                    given = [self.given_of(one, part, own) for one in chunks]
                kept = []
                for at, one in enumerate(chunks):
                    entering = self._entering(part, given[at], keeps=keeps)
                    given[at] = ()
                    made = leaves_of(self._compute(part, entering))
                    if keeps:
                        kept.append((entering, made))
                    self._give(one, part, made, outputs)
                if passed is not None:
                    passed.kept.append(kept)
        found = {number: there(one) for number, one in outputs.items()}
        self._finish()
        return found, passed

    def _mine(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return [one for one in chunks if one.owner == self.here]

    def given_of(self, one: Chunk, part: int, own: Values) -> "Sequence[Tensor] | Incoming":
        """What a part is given of a micro-batch, on its way as soon as its maker has it."""
        if part == 0 and one.owner == 0:
            return own[one.number]
        source, tag = (one.owner, INPUT) if part == 0 else (self._worker(part - 1), _there_of(part))
        return self.expect([shape.empty(one.rows) for shape in self._borders[part]], source, tag)

    def _worker(self, part: int) -> int:
        return part % self._group.size

    def _entering(
        self, part: int, given: "Sequence[Tensor] | Incoming", *, keeps: bool
    ) -> list[Tensor]:
        found = there(given)
        if keeps and part:
            found = [x.requires_grad_(x.is_floating_point() or x.is_complex()) for x in found]
        return found

    def _compute(self, part: int, entering: Sequence[Tensor]) -> Any:
        start_s = time.perf_counter()
        made = self._modules[part // self._group.size](*entering)
        self.busy_s += time.perf_counter() - start_s
        return made

    def _give(
        self,
        one: Chunk,
        part: int,
        made: Sequence[Tensor],
        outputs: "dict[int, Sequence[Tensor] | Incoming]",
    ) -> None:
        """What it has made goes on, or to whose it is."""
        refuse_other_sizes(made, self._borders[part + 1], one.rows)
        leaving = [tensor.detach() for tensor in made]
        if part < self.last:
            self._send(leaving, self._worker(part + 1), _there_of(part + 1))
        elif one.owner == self.here:
            outputs[one.number] = leaving
        else:
            self._send(leaving, one.owner, _OUTPUT)

    def backward(self, passed: Passed, own: Values) -> None:
        """The gradients of all micro-batches through these parts, which add them to their own.

        Args:
            own: of those outputs of this worker's chunks that are ``used``.
        """
        if self.here != self._end:
            for one in self._mine(passed.chunks):
                self._send(own[one.number], self._end, _OUTPUT_GRAD)
        for part in reversed(self._parts):
            coming = [self.gradients_of(one, part, own) for one in passed.chunks]
            kept = passed.kept.pop()
            for at in range(len(passed.chunks)):
                given, made = kept[at]
                kept[at] = ([], [])
                gradients, coming[at] = there(coming[at]), ()
                self._go_back(part, given, made, gradients)
        self._add_late()
        self._finish()

    def _go_back(
        self,
        part: int,
        given: Sequence[Tensor],
        made: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        """One micro-batch through a part, and what it was given has gradients for the one before.

        Args:
            gradients: of what it made that is used.
        """
        pairs = [
            (made[number], gradient)
            for number, gradient in zip(self.used[part + 1], gradients, strict=True)
            if made[number].requires_grad
        ]
        if pairs:
            self._compute_back(*zip(*pairs, strict=True))
        self._give_back(part, given)

    def _compute_back(self, made: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        start_s = time.perf_counter()
        torch.autograd.backward(made, gradients)
        self.busy_s += time.perf_counter() - start_s

    def _add_late(self) -> None:
        """The gradients of weights that nobody has waited for."""
        start_s = time.perf_counter()
        self._late.add()
        self.busy_s += time.perf_counter() - start_s

    def _give_back(self, part: int, given: Sequence[Tensor]) -> None:
        if part:
            entered = [given[number] for number in self.used[part]]
            back = [torch.zeros_like(x) if x.grad is None else x.grad for x in entered]
            self._send(back, self._worker(part - 1), _back_of(part))

    def gradients_of(self, one: Chunk, part: int, own: Values) -> "Sequence[Tensor] | Incoming":
        """Of what a part has made of a micro-batch."""
        is_last = part == self.last
        if is_last and one.owner == self.here:
            return own[one.number]
        source, tag = (
            (one.owner, _OUTPUT_GRAD) if is_last else (self._worker(part + 1), _back_of(part + 1))
        )
        shapes = self._borders[part + 1]
        rooms = [shapes[number].empty(one.rows) for number in self.used[part + 1]]
        return self.expect(rooms, source, tag)

    # -- messages -------------------------------------------------------------------------------

    def _send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        for one in tensors:
            whole = one.contiguous()
            self._sent.append((self._group.begin_send(whole, peer, tag), whole))

    def expect(self, rooms: list[Tensor], peer: int, tag: int) -> "Incoming":
        return Incoming(rooms, [self._group.begin_receive(one, peer, tag) for one in rooms])

    def _finish(self) -> None:
        """All that was sent has arrived."""
        for pending, _ in self._sent:
            pending.wait()
        self._sent.clear()


class Incoming(NamedTuple):
    """Tensors on their way here, while others are computed."""

    rooms: list[Tensor]
    under_way: list[Pending]


def there(tensors: Sequence[Tensor] | Incoming) -> list[Tensor]:
    """Once they have arrived."""
    if not isinstance(tensors, Incoming):
        return list(tensors)
    for one in tensors.under_way:
        one.wait()
    return tensors.rooms


def refuse_other_sizes(made: Sequence[Tensor], shapes: Sequence[TensorShape], rows: int) -> None:
    """Raise ConfigError where this is not what the next worker has made room for."""
    if len(made) != len(shapes) or not all(
        shape.is_of(one, rows) for one, shape in zip(made, shapes, strict=True)
    ):
        raise ConfigError(
            f"a part of the model gives {[list(one.shape) for one in made]} for {rows} samples, "
            f"where the first batch says {[list(one.empty(rows).shape) for one in shapes]}: sizes "
            "that depend on the data cannot cross a split model's borders; use --split data or "
            "shard"
        )


def _there_of(border: int) -> int:
    """The tag of what crosses a border forward."""
    return _BORDERS + 2 * border


def _back_of(border: int) -> int:
    return _BORDERS + 2 * border + 1
