"""A chunk of an update that is small enough to stay in a cache from its mean to its step.

    slots   [ gradients of seat 0 ]  \\
            [ gradients of seat 1 ]   >  mean -> kept aside -> optimizer -> parameters, state
            [ ...                 ]  /

An update touches each byte of a model six to eight times; in chunks it is read from memory once for
all of them, and the mean is never written there. Optimizers that do not work element by element get
their whole share as one chunk. This module must not know who executes which chunks, nor when.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..replica.replica import Replica
from ..store.layout import ALIGN_BYTES, Layout
from ..store.means import average_into
from ..store.optimizer import Groups, Piece, Updater
from ..store.optimizer_copy import is_elementwise
from ..store.parameter_store import SharedStore
from ..store.sums import Stretch, wide

Ranges = list[Stretch]
CHUNK_BYTES = 1 << 20
"""So that what is read twice is still in a cache near the core. Each chunk has an overhead of some
15 us: chunks of half the size gain less, and so do chunks of twice the size."""
MOST_CHUNKS = 256
"""Per share, since all chunks are made when the run begins."""


def cut(ranges: Ranges, rule: Optimizer) -> Iterator[Ranges]:
    """Yield the chunks of a share in order; every member cuts them alike."""
    if not is_elementwise(rule):
        if ranges:
            yield ranges
        return
    total = sum(run.stop - run.start for run in ranges)
    size = max(CHUNK_BYTES, -(-total // (MOST_CHUNKS * ALIGN_BYTES)) * ALIGN_BYTES)
    for run in ranges:
        for start in range(run.start, run.stop, size):
            yield [Stretch(run.dtype, start, min(start + size, run.stop))]


def scratch_for(parts: Sequence[Ranges], rule: Optimizer) -> Tensor | None:
    """Return memory for the mean of one chunk at a time; None: the share is one chunk."""
    if not is_elementwise(rule):
        return None
    most_bytes = max((run.stop - run.start for (run,) in parts), default=0)
    return torch.empty(most_bytes, dtype=torch.uint8)


class _Mean(NamedTuple):
    """Memory with a mean of gradients; ``first``: the layout's offset at which it begins."""

    memory: Tensor
    first: int
    runs: list[Tensor]


class _Kept(NamedTuple):
    """Memory that an update changes, and the copy to undo that from."""

    undo: Tensor
    live: Tensor


class ShareChunk:
    """One chunk of the update of a block.

    Args:
        block: number of the block with the parameters; the other one holds the undo copies.
        mean: memory for the means of all chunks, at the layout's offsets.
        scratch: memory for the mean of this chunk alone; None: there is none.

    Attributes:
        at: offset of its first parameter.
    """

    def __init__(
        self, store: SharedStore, replica: Replica, rule: Optimizer, ranges: Ranges, *, block: int,
        mean: Tensor, scratch: Tensor | None,
    ) -> None:  # fmt: skip
        self.at = first = ranges[0].start
        self._mean = self._of_all = _Mean(mean, 0, [run.of(mean) for run in ranges])
        self._alone = self._of_all
        if scratch is not None:
            own = [Stretch(run.dtype, run.start - first, run.stop - first) for run in ranges]
            self._alone = _Mean(scratch, first, [run.of(scratch) for run in own])
        seats = range(store.control.num_seats)
        self._parts = [[run.of(store.slot(seat)) for run in ranges] for seat in seats]
        live, undo = store.blocks[block], store.blocks[1 - block]
        self._updater = Updater(
            rule, replica.parameters, replica.layout, live, _pieces(replica.layout, ranges)
        )
        self._kept = [_Kept(run.of(undo), run.of(live)) for run in ranges]
        for entry, view in self._updater.state_views():
            offset = entry.place.offset + (view.data_ptr() - entry.place.view(live).data_ptr())
            size = view.numel() * view.element_size()
            if not view.is_contiguous():
                size = entry.place.num_bytes
            self._kept.append(_Kept(undo[offset : offset + size], live[offset : offset + size]))
        self._private: list[Tensor] | None = None

    # -- the mean -------------------------------------------------------------------------------

    def average(self, weights: Sequence[float], *, stays: bool = True) -> None:
        """Make the weighted mean of all slots' gradients, without those of weight 0.

        Args:
            stays: whether it is kept until all chunks have one, or only until the next chunk's.
        """
        self._mean = self._of_all if stays else self._alone
        seats = [seat for seat, weight in enumerate(weights) if weight]
        seat_weights = [weights[seat] for seat in seats]
        for i, mean in enumerate(self._mean.runs):
            average_into(mean, [self._parts[seat][i] for seat in seats], seat_weights)

    def sum(self) -> float:
        """Return the sum of absolute sums, which is not finite if an element is not."""
        return math.fsum(abs(mean.sum(dtype=wide(mean)).item()) for mean in self._mean.runs)

    def squared_norm(self) -> float:
        norms = [torch.linalg.vector_norm(mean, dtype=wide(mean)) for mean in self._mean.runs]
        return math.fsum(float(norm) ** 2 for norm in norms)

    def scale(self, factor: float) -> None:
        for mean in self._mean.runs:
            mean.mul_(factor)

    def clamp(self, most: float) -> None:
        for mean in self._mean.runs:
            mean.clamp_(-most, most)

    # -- the step ---------------------------------------------------------------------------------

    def keep(self) -> None:
        """Copy what the step changes into the undo copy."""
        for undo, live in self._kept:
            undo.copy_(live)
        self._private = self._updater.private_state()

    def step(self, present: Sequence[int], groups: Groups) -> None:
        memory, first, _ = self._mean
        self._updater.step(memory, present, groups, first=first)

    def adopt(self) -> None:
        """Overwrite its parameters with the mean."""
        for (_, live), mean in zip(self._kept, self._mean.runs, strict=False):  # parameters first
            live.copy_(mean)

    def restore(self) -> None:
        """Restore what ``keep`` saved, also if another member saved it."""
        for undo, live in self._kept:
            live.copy_(undo)
        if self._private is not None:
            self._updater.revert(self._private)
            self._private = None


def _pieces(layout: Layout, ranges: Ranges) -> Iterator[Piece]:
    """Yield the elements of each parameter that lie in the ranges."""
    for run in ranges:
        for number, place in enumerate(layout.parameters.places):
            size = place.dtype.itemsize
            start = max(run.start, place.offset)
            stop = min(run.stop, place.offset + place.num_bytes)
            if start < stop:
                yield Piece(number, (start - place.offset) // size, (stop - place.offset) // size)
