"""Which bytes of a block each member updates, and the work on one share.

Optimizers that work element by element get equal runs of bytes; all others get whole tensors, as
evenly as they go. This module must not know barriers, messages or leases.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..replica.replica import Replica
from ..store.layout import ALIGN_BYTES, Layout
from ..store.means import average_into, average_of_buffers
from ..store.optimizer import Groups, Piece, Updater
from ..store.optimizer_copy import is_elementwise
from ..store.parameter_store import SharedStore
from ..store.sums import Stretch, wide

Ranges = list[Stretch]


def split_shares(layout: Layout, rule: Optimizer, num_members: int) -> list[Ranges]:
    """Per member, the runs of bytes of the parameters that it updates."""
    if is_elementwise(rule):
        return [_even(layout, member, num_members) for member in range(num_members)]
    shares: list[Ranges] = [[] for _ in range(num_members)]
    load = [0] * num_members
    for place in sorted(layout.parameters.places, key=lambda one: -one.num_bytes):
        least = load.index(min(load))
        load[least] += place.num_bytes
        shares[least].append(Stretch(place.dtype, place.offset, place.offset + place.num_bytes))
    return shares


def _even(layout: Layout, member: int, num_members: int) -> Ranges:
    runs = []
    for dtype, start, stop in layout.parameters.runs():
        lines = -(-(stop - start) // ALIGN_BYTES)
        first = start + lines * member // num_members * ALIGN_BYTES
        last = min(stop, start + lines * (member + 1) // num_members * ALIGN_BYTES)
        if first < last:
            runs.append(Stretch(dtype, first, last))
    return runs


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _pieces(layout: Layout, ranges: Ranges) -> list[Piece]:
    """The elements of each parameter that lie in the ranges."""
    pieces = []
    for run in ranges:
        for number, place in enumerate(layout.parameters.places):
            size = place.dtype.itemsize
            start = max(run.start, place.offset)
            stop = min(run.stop, place.offset + place.num_bytes)
            if start < stop:
                pieces.append(
                    Piece(number, (start - place.offset) // size, (stop - place.offset) // size)
                )
    return pieces


class Share:
    """One member's part of the update of the current block.

    Args:
        seat: whose share it is.
        block: number of the block that the parameters live in; the other one holds undo copies.
    """

    def __init__(
        self, store: SharedStore, replica: Replica, rule: Optimizer, *, seat: int, block: int
    ) -> None:
        ranges = split_shares(replica.layout, rule, store.control.num_seats)[seat]
        self._mark = store.control.marks[seat]
        self._control = store.control
        self._store = store
        self._replica = replica
        self.ranges = [(run.start, _aligned(run.stop)) for run in ranges]
        """Where this share's parameters lie, in bytes, with what fills up their last line."""
        live, undo = store.blocks[block], store.blocks[1 - block]
        mean = store.sum_slot
        self._mean = [run.of(mean) for run in ranges]
        self._slots = [
            [run.of(store.slot(seat)) for run in ranges] for seat in range(store.control.num_seats)
        ]
        pieces = _pieces(replica.layout, ranges)
        self._updater = Updater(rule, replica.parameters, replica.layout, live, pieces)
        self._kept = [(run.of(undo), run.of(live)) for run in ranges]
        for entry, view in self._updater.state_views():
            offset = entry.place.offset + (view.data_ptr() - entry.place.view(live).data_ptr())
            size = view.numel() * view.element_size()
            if view.is_contiguous():
                self._kept.append((undo[offset : offset + size], live[offset : offset + size]))
            else:
                whole = slice(offset, offset + entry.place.num_bytes)
                self._kept.append((undo[whole], live[whole]))
        self._private: list[Tensor] | None = None
        self._buffers = replica.layout.buffers.places

    def average(self, weights: Sequence[float]) -> float:
        """The weighted mean of all slots' gradients in this share; its plain sum, to see nan."""
        check = 0.0
        used = [seat for seat, weight in enumerate(weights) if weight]
        shares = [weights[seat] for seat in used]
        for i, mean in enumerate(self._mean):
            average_into(mean, [self._slots[seat][i] for seat in used], shares)
            check += float(mean.sum(dtype=wide(mean)))
        return check

    def squared_norm(self) -> float:
        norms = [torch.linalg.vector_norm(one, dtype=wide(one)) for one in self._mean]
        return math.fsum(float(norm) ** 2 for norm in norms)

    def scale(self, factor: float) -> None:
        for mean in self._mean:
            mean.mul_(factor)

    def clamp(self, most: float) -> None:
        for mean in self._mean:
            mean.clamp_(-most, most)

    def keep(self, mark: int) -> None:
        """Copy parameters and state of this share aside; ``mark`` says for which version."""
        for undo, live in self._kept:
            undo.copy_(live)
        self._private = self._updater.private_state()
        self._control[self._mark] = mark

    def step(self, present: Sequence[int], groups: Groups) -> None:
        self._updater.step(self._store.sum_slot, present, groups)

    def restore(self, mark: int) -> None:
        """Put this share back to what ``keep`` found, if it was kept for ``mark``."""
        if self._control[self._mark] == mark:
            for undo, live in self._kept:
                live.copy_(undo)
            self._control[self._mark] = 0
            if self._private is not None:
                self._updater.revert(self._private)
                self._private = None

    def average_buffers(self, weights: Sequence[float]) -> None:
        """Float buffers: the mean by samples; counters: the maximum. Into the model's own."""
        used = [seat for seat, weight in enumerate(weights) if weight]
        if not used:
            return
        shares = [weights[seat] for seat in used]
        for buffer, place in zip(self._replica.buffers, self._buffers, strict=True):
            parts = [place.view(self._store.slot(seat)) for seat in used]
            buffer.copy_(average_of_buffers(parts, shares))
