"""Averaging in shared memory: which bytes of a block each member updates, and the work on a share.

    member 0   gradient -> slot 0 |   | share 0 of all slots -> mean -> optimizer |   | next step
    member 1   gradient -> slot 1 | 1 | share 1 of all slots -> mean -> optimizer | 2 | next step
                              barrier                                         barrier

The parameters exist once, in the store's current block; every member computes on them and updates
its own share of them. Before it does, it copies its share (parameters and state) into the other
block and sets a mark, so a death harms nothing: survivors put every share back. One member alone
needs neither: its gradient is the mean, it looks at it before it steps, and nobody would put
anything back. Optimizers that
work element by element get equal runs of bytes; all others get whole tensors, as evenly as they go.
What is updated at different times (fragments) is shared out each by itself. Above 300 lines, since
a share and the rounds that step on it are read together. This module must not know messages or
leases.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..replica.replica import Replica
from ..store.clip import Clip
from ..store.fragments import Fragment, Fragments
from ..store.layout import ALIGN_BYTES, Layout
from ..store.means import average_into, average_of_buffers
from ..store.optimizer import Groups, Piece, Updater
from ..store.optimizer_copy import is_elementwise
from ..store.parameter_store import SharedStore
from ..store.sums import Stretch, wide
from ..system.pages import give_back_freed
from . import Route
from .averaging import Averaging, only_first
from .base import ScriptHooks, Work
from .model_copy import ModelCopy
from .rounds import Barrier

Ranges = list[Stretch]


def split_shares(
    layout: Layout, rule: Optimizer, num_members: int, fragments: Sequence[Fragment]
) -> list[Ranges]:
    """Per member, the runs of bytes of the parameters that it updates.

    Args:
        fragments: that are updated each at its time; together they are all parameters.
    """
    if is_elementwise(rule):
        runs = [Stretch(*run) for one in fragments for run in one.runs(layout.parameters)]
        return [_even(runs, member, num_members) for member in range(num_members)]
    shares: list[Ranges] = [[] for _ in range(num_members)]
    load = [0] * num_members
    for place in sorted(layout.parameters.places, key=lambda one: -one.num_bytes):
        least = load.index(min(load))
        load[least] += place.num_bytes
        shares[least].append(Stretch(place.dtype, place.offset, place.offset + place.num_bytes))
    return shares


def _even(whole: Sequence[Stretch], member: int, num_members: int) -> Ranges:
    runs = []
    for one in whole:
        lines = -(-(one.stop - one.start) // ALIGN_BYTES)
        first = one.start + lines * member // num_members * ALIGN_BYTES
        last = min(one.stop, one.start + lines * (member + 1) // num_members * ALIGN_BYTES)
        if first < last:
            runs.append(Stretch(one.dtype, first, last))
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


class _Kept(NamedTuple):
    """What an update changes, and where it is kept meanwhile; ``at``: the place in parameters."""

    at: int
    undo: Tensor
    live: Tensor


class Share:
    """One member's part of the update of the current block.

    Args:
        seat: whose share it is.
        block: number of the block that the parameters live in; the other one holds undo copies.
        fragments: that are updated each at its time.

    Attributes:
        due: what is updated now; all else of this share stays as it is.
        is_alone: whether the run has this one member.
    """

    def __init__(
        self,
        store: SharedStore,
        replica: Replica,
        rule: Optimizer,
        fragments: Fragments,
        *,
        seat: int,
        block: int,
    ) -> None:
        self._whole = self.due = fragments.whole
        num_members = store.control.num_seats
        self.is_alone = num_members == 1
        ranges = split_shares(replica.layout, rule, num_members, fragments.each)[seat]
        self._mark = store.control.marks[seat]
        self._control = store.control
        self._store = store
        self._replica = replica
        self.ranges = [(run.start, _aligned(run.stop)) for run in ranges]
        """Where this share's parameters lie, in bytes, with what fills up their last line."""
        live, undo = store.blocks[block], store.blocks[1 - block]
        self.mean = store.slot(seat) if self.is_alone else store.sum_slot
        """Where it is, the layout's offsets."""
        self._mean = [run.of(self.mean) for run in ranges]
        self._slots = [
            [run.of(store.slot(seat)) for run in ranges] for seat in range(store.control.num_seats)
        ]
        pieces = _pieces(replica.layout, ranges)
        self._updater = Updater(rule, replica.parameters, replica.layout, live, pieces)
        self._kept = [_Kept(run.start, run.of(undo), run.of(live)) for run in ranges]
        for entry, view in self._updater.state_views():
            offset = entry.place.offset + (view.data_ptr() - entry.place.view(live).data_ptr())
            size = view.numel() * view.element_size()
            if not view.is_contiguous():
                size = entry.place.num_bytes
            bytes_ = slice(offset, offset + size)
            at = replica.layout.parameters.places[entry.parameter].offset
            self._kept.append(_Kept(at, undo[bytes_], live[bytes_]))
        self._private: list[Tensor] | None = None
        self._buffers = replica.layout.buffers.places

    def _due(self) -> list[int]:
        """Which of the ranges are of the update that comes next."""
        return [i for i, (start, _) in enumerate(self.ranges) if self._is_due(start)]

    def _is_due(self, at: int) -> bool:
        return self.due is self._whole or self.due.start <= at < self.due.stop

    def _means(self) -> list[Tensor]:
        return [self._mean[i] for i in self._due()]

    def _kept_now(self) -> list[_Kept]:
        return [one for one in self._kept if self._is_due(one.at)]

    def average(self, weights: Sequence[float]) -> float:
        """The weighted mean of all slots' gradients in this share; its plain sum, to see nan."""
        check = 0.0
        used = [seat for seat, weight in enumerate(weights) if weight]
        shares = [weights[seat] for seat in used]
        for i in self._due():
            mean = self._mean[i]
            if not self.is_alone:
                average_into(mean, [self._slots[seat][i] for seat in used], shares)
            check += abs(mean.sum(dtype=wide(mean)).item())
        return check

    def squared_norm(self) -> float:
        norms = [torch.linalg.vector_norm(one, dtype=wide(one)) for one in self._means()]
        return math.fsum(float(norm) ** 2 for norm in norms)

    def scale(self, factor: float) -> None:
        for mean in self._means():
            mean.mul_(factor)

    def clamp(self, most: float) -> None:
        for mean in self._means():
            mean.clamp_(-most, most)

    def adopt(self) -> None:
        """The parameters of this share become what ``average`` came to."""
        for kept, mean in zip(self._kept, self._mean, strict=False):  # parameters come first
            kept.live.copy_(mean)

    def keep(self, mark: int) -> None:
        """Copy parameters and state of this share aside; ``mark`` says for which version."""
        if self.is_alone:
            return
        for _, undo, live in self._kept_now():
            undo.copy_(live)
        self._private = self._updater.private_state()
        self._control[self._mark] = mark

    def step(self, present: Sequence[int], groups: Groups) -> None:
        self._updater.step(self.mean, present, groups)

    def restore(self, mark: int) -> None:
        """Put this share back to what ``keep`` found, if it was kept for ``mark``."""
        if self._control[self._mark] == mark:
            for _, undo, live in self._kept_now():
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


class SharedAveraging(Averaging):
    """Peers that see one store: the weights are views into its current block."""

    def __init__(self, copy: ModelCopy, barrier: Barrier, hooks: ScriptHooks, route: Route) -> None:
        super().__init__(copy, barrier, hooks, route)
        self._share = self._share_of(self._seat)
        self.come_back()
        give_back_freed()  # the memory that the model was made in

    def _share_of(self, seat: int) -> Share:
        copy = self._copy
        return Share(
            self._store, self._replica, copy.rule, copy.own.fragments, seat=seat, block=self.block
        )

    @property
    def _live(self) -> Tensor:
        return self._store.blocks[self.block]

    def come_back(self) -> None:
        """The weights on the shared block, where others read them."""
        if not self._copy.is_difference:
            self._replica.live_in(self._live)
            self._copy.unedited.watch(self._live, self._share.ranges)
            self._copy.unedited.mark(self._copy.home)  # others may be at work already

    def step_aside(self) -> None:
        """Between epochs the weights lie alone."""
        if not self._copy.is_difference:
            self._replica.live_in(self._copy.home)
            self._copy.unedited.watch(self._copy.home)
            self._copy.unedited.mark()

    # -- a round --------------------------------------------------------------------------------

    def _fill(self, work: Work) -> None:
        if self._copy.is_difference:
            self._copy.unedited.check()
            self._copy.fill(work, self._copy.version)
            return
        self._copy.unedited.glance()
        if work.inv_scale != 1.0:
            self._replica.scale_gradients(work.inv_scale)
        self._replica.collect(self._store.present(self._seat))

    def _step(self, weights: Sequence[float], present: Sequence[int], clip: Clip) -> None:
        """Mean of this member's share of all gradients, and the optimizer's step on it."""
        share, version = self._share, self._copy.version
        if self._copy.is_lockstep:
            self._adopt(weights)
            return
        share.due = self._copy.own.due
        if self._is_bad(weights):
            self._hooks.advance_schedule(version)
            return
        if clip.has_norm:
            self._clip(clip)
        if clip.has_value:
            share.clamp(clip.max_value)
        share.keep(version + 1)
        self._hooks.advance_schedule(version)
        share.step(present, self._copy.rule.param_groups)
        share.average_buffers(weights)
        if not self._copy.is_difference:
            self._copy.unedited.mark()

    def _adopt(self, weights: Sequence[float]) -> None:
        """All have made the same step by themselves: its parameters, of the first who pushed."""
        share, version = self._share, self._copy.version
        if self._is_bad(only_first(weights)):
            return
        share.keep(version + 1)
        share.adopt()
        share.average_buffers(weights)

    def _is_bad(self, weights: Sequence[float]) -> bool:
        """Average this share; whether nothing is to be stepped on, since it is known to be bad.

        Another member's share may be bad, too: among several all step, and put it back.
        """
        if math.isfinite(self._share.average(weights)):
            return False
        self._barrier.show_bad(self._copy.version)
        return self._share.is_alone

    def _mean_of_gradients(self, weights: Sequence[float]) -> Tensor:
        self._share.average(weights)
        return self._share.mean

    def _clip(self, clip: Clip) -> None:
        """Clip the mean gradient by its whole norm: one barrier more."""
        self._barrier.show_norm(self._share.squared_norm())
        self._barrier.wait()
        self.norm = math.sqrt(sum(self._barrier.squared_norms()))
        if (factor := clip.factor(self.norm)) != 1.0:
            self._share.scale(factor)

    def _undo_if_bad(self) -> bool:
        is_bad = self._barrier.is_bad(self._copy.version)
        if is_bad and not self._is_skipped:
            self._share.restore(self._copy.version + 1)
            if not self._copy.is_difference:
                self._copy.unedited.mark()
            self._refuse_if_mine()
            self._barrier.wait()
        return is_bad

    # -- the way out ----------------------------------------------------------------------------

    def give_up(self, work: Work, *, is_updating: bool) -> None:
        if is_updating:
            self._share.restore(self._copy.version + 1)
        super().give_up(work, is_updating=is_updating)

    def restore_the_dead(self) -> None:
        for seat, gone in enumerate(self._store.control.gone):
            if self._store.control[gone]:
                share = self._share_of(seat)
                share.due = self._copy.own.due
                share.restore(self._copy.version + 1)
