"""Micro-batches through the parts of a model, and their gradients back.

    part 0   F0 F1 F2 F3 ............ B0 B1 B2 B3        forward: when the scripts call the model
    part 1      F0 F1 F2 F3 ..... B0 B1 B2 B3            backward: when they call backward()

    inputs   of each worker -> part 0         outputs     last part -> each worker
    border   part k -> part k + 1             gradients   all of it the other way

The schedule is gpipe's, since a script's loss stands between the two (Y. Huang et al., "GPipe",
2019, section 2.2). Micro-batches of all workers take turns, so that nobody's outputs come last.
What a part needs for its backward pass it keeps. This module must not know what a loss is.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..exchange.group import Pending
from .group import PeerGroup

_INPUT, _BORDER, _OUTPUT, _OUTPUT_GRAD, _BORDER_GRAD = range(5)
"""Tags: of two kinds of messages between the same two workers neither waits for the other."""


class TensorShape(NamedTuple):
    """What crosses a border, for any number of rows of a micro-batch.

    Attributes:
        fixed, growing: each dimension is ``fixed + growing * rows``.
    """

    dtype: torch.dtype
    fixed: tuple[int, ...]
    growing: tuple[int, ...]

    def empty(self, rows: int) -> Tensor:
        """Room for one."""
        return torch.empty(self._size(rows), dtype=self.dtype)

    def num_bytes(self, rows: int) -> int:
        return math.prod(self._size(rows)) * self.dtype.itemsize

    def _size(self, rows: int) -> list[int]:
        return [a + b * rows for a, b in zip(self.fixed, self.growing, strict=True)]

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


class Chunk(NamedTuple):
    """A micro-batch: whose it is, which of theirs, and its rows."""

    owner: int
    number: int
    rows: int


def chunk_rows(rows: int, most: int) -> list[int]:
    """The rows of each micro-batch, at most so many, as even as can be.

    Example:
        >>> chunk_rows(7, 3)
        [3, 2, 2]
    """
    num = min(rows, most)
    return [rows // num + (i < rows % num) for i in range(num)] if num else []


def chunks_of(rows: Sequence[int], most: int) -> list[Chunk]:
    """The micro-batches of all workers, in the order in which they are computed.

    Args:
        rows: of each worker's mini-batch.
    """
    own = [chunk_rows(one, most) for one in rows]
    return [
        Chunk(owner, number, sizes[number])
        for number in range(max(map(len, own), default=0))
        for owner, sizes in enumerate(own)
        if number < len(sizes)
    ]


@dataclass(slots=True)
class Passed:
    """A forward pass that a backward pass may follow.

    Attributes:
        kept: of each chunk what its part was given and made; empty: the backward pass is over.
    """

    chunks: list[Chunk]
    kept: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)


Values = Mapping[int, Sequence[Tensor]]
"""Of a worker's own chunks, by their index."""


class PartRunner:
    """One worker's part.

    Args:
        module: takes what crosses the border before it, gives what crosses the one behind it.
        borders: what crosses each: inputs, ..., outputs.
    """

    def __init__(
        self, module: nn.Module, group: PeerGroup, borders: Sequence[Sequence[TensorShape]]
    ) -> None:
        self._module, self._group = module, group
        self._part, self._last = group.rank, group.size - 1
        self._given, self._made = borders[self._part], borders[self._part + 1]
        self._outputs = borders[-1]
        self._inputs = borders[0]
        self._sent: list[tuple[Pending, Tensor]] = []
        self.busy_s = 0.0
        """Of computing, forward and backward, since it was set to 0."""

    def forward(
        self, chunks: list[Chunk], own: Values, *, keeps: bool
    ) -> tuple[dict[int, list[Tensor]], Passed | None]:
        """All micro-batches through this part; the outputs of those that are this worker's.

        Args:
            keeps: a backward pass may follow.
        """
        passed = Passed(chunks) if keeps else None
        given = [self._given_of(one, own) for one in chunks]
        outputs: dict[int, Sequence[Tensor] | Incoming] = {}
        for one in self._mine(chunks):
            if self._part:
                self._send(own[one.number], 0, _INPUT)
            if self._part != self._last:
                rooms = [shape.empty(one.rows) for shape in self._outputs]
                outputs[one.number] = self._expect(rooms, self._last, _OUTPUT)
        with torch.set_grad_enabled(keeps):
            for at, one in enumerate(chunks):
                entering = _there(given[at])
                given[at] = ()
                if keeps and self._part:
                    entering = [x.requires_grad_(x.is_floating_point()) for x in entering]
                start_s = time.perf_counter()
                made = _tensors(self._module(*entering))
                self.busy_s += time.perf_counter() - start_s
                if passed is not None:
                    passed.kept.append((entering, made))
                self._give(one, made, outputs)
        found = {number: _there(one) for number, one in outputs.items()}
        self._finish()
        return found, passed

    def _mine(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return [one for one in chunks if one.owner == self._part]

    def _given_of(self, one: Chunk, own: Values) -> "Sequence[Tensor] | Incoming":
        """What this part is given of a micro-batch, on its way as soon as its maker has it."""
        if self._part == 0 and one.owner == 0:
            return own[one.number]
        source, tag = (one.owner, _INPUT) if self._part == 0 else (self._part - 1, _BORDER)
        return self._expect([shape.empty(one.rows) for shape in self._given], source, tag)

    def _give(
        self, one: Chunk, made: Sequence[Tensor], outputs: "dict[int, Sequence[Tensor] | Incoming]"
    ) -> None:
        """What it has made goes on, or to whose it is."""
        leaving = [tensor.detach() for tensor in made]
        if self._part < self._last:
            self._send(leaving, self._part + 1, _BORDER)
        elif one.owner == self._part:
            outputs[one.number] = leaving
        else:
            self._send(leaving, one.owner, _OUTPUT)

    def backward(self, passed: Passed, own: Values) -> None:
        """The gradients of all micro-batches through this part, which adds them to its own.

        Args:
            own: of the outputs of this worker's chunks that have gradients.
        """
        coming = [self._gradients_of(one, own) for one in passed.chunks]
        if self._part != self._last:
            for one in self._mine(passed.chunks):
                self._send(own[one.number], self._last, _OUTPUT_GRAD)
        for at in range(len(passed.chunks)):
            given, made = passed.kept[at]
            passed.kept[at] = ([], [])
            has_gradient = [made[i] for i, shape in enumerate(self._made) if shape.has_gradient]
            pairs = [
                (tensor, gradient)
                for tensor, gradient in zip(has_gradient, _there(coming[at]), strict=True)
                if tensor.requires_grad
            ]
            coming[at] = ()
            if pairs:
                tensors, gradients = zip(*pairs, strict=True)
                start_s = time.perf_counter()
                torch.autograd.backward(tensors, gradients)
                self.busy_s += time.perf_counter() - start_s
            if self._part:
                back = [given[i] for i, shape in enumerate(self._given) if shape.has_gradient]
                self._send(
                    [torch.zeros_like(x) if x.grad is None else x.grad for x in back],
                    self._part - 1,
                    _BORDER_GRAD,
                )
        passed.kept.clear()
        self._finish()

    def _gradients_of(self, one: Chunk, own: Values) -> "Sequence[Tensor] | Incoming":
        """Of what this part has made of a micro-batch."""
        is_last = self._part == self._last
        if is_last and one.owner == self._part:
            return own[one.number]
        source, tag = (one.owner, _OUTPUT_GRAD) if is_last else (self._part + 1, _BORDER_GRAD)
        rooms = [shape.empty(one.rows) for shape in self._made if shape.has_gradient]
        return self._expect(rooms, source, tag)

    # -- messages -------------------------------------------------------------------------------

    def _send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        for one in tensors:
            whole = one.contiguous()
            self._sent.append((self._group.begin_send(whole, peer, tag), whole))

    def _expect(self, rooms: list[Tensor], peer: int, tag: int) -> "Incoming":
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


def _there(tensors: Sequence[Tensor] | Incoming) -> list[Tensor]:
    """Once they have arrived."""
    if not isinstance(tensors, Incoming):
        return list(tensors)
    for one in tensors.under_way:
        one.wait()
    return tensors.rooms


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(values) if isinstance(one, Tensor)]
