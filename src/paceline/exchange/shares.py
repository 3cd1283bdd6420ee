"""Averaging in shared memory: which bytes of a block each member updates, and how.

    member 0   gradient -> slot 0 |   | share 0 of all slots -> mean -> optimizer |   | next step
    member 1   gradient -> slot 1 | 1 | share 1 of all slots -> mean -> optimizer | 2 | next step
                              barrier                                         barrier

The parameters exist once, in the store's current block; every member computes on them and updates
its own share of them, chunk by chunk (share_chunks.py). Before it changes a chunk, it copies it
(parameters and state) into the other block and counts it, so survivors can undo every share after a
death. A single member needs neither: its gradient is the mean, it checks it before it steps, and
nobody is left to undo anything. Optimizers that work element by element get equal runs of bytes;
all others get whole tensors, as evenly as possible. Fragments, which are updated at different
times, are shared out one by one. Above 300 lines, since a share and the rounds that step on it are
read together. This module must not know messages or leases.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ..replica.replica import Replica
from ..store.clip import Clip
from ..store.fragments import Fragment, Fragments
from ..store.layout import ALIGN_BYTES, Layout
from ..store.means import average_of_buffers
from ..store.optimizer_copy import is_elementwise
from ..store.parameter_store import SharedStore
from ..store.sums import Stretch
from ..system.pages import give_back_freed
from . import Route
from .averaging import Averaging, only_first
from .base import ScriptHooks, Work
from .model_copy import ModelCopy
from .rounds import Barrier
from .share_chunks import Ranges, ShareChunk, cut, scratch_for


def split_shares(
    layout: Layout, rule: Optimizer, num_members: int, fragments: Sequence[Fragment]
) -> list[Ranges]:
    """Return, per member, the byte ranges of the parameters that it updates.

    Args:
        fragments: are updated at different times; together they are all parameters.
    """
    if is_elementwise(rule):
        runs = [Stretch(*run) for part in fragments for run in part.runs(layout.parameters)]
        return [_even(runs, member, num_members) for member in range(num_members)]
    shares: list[Ranges] = [[] for _ in range(num_members)]
    load = [0] * num_members
    for place in sorted(layout.parameters.places, key=lambda place: -place.num_bytes):
        member = load.index(min(load))
        load[member] += place.num_bytes
        shares[member].append(Stretch(place.dtype, place.offset, place.offset + place.num_bytes))
    return shares


def _even(stretches: Sequence[Stretch], member: int, num_members: int) -> Ranges:
    runs = []
    for run in stretches:
        num_lines = -(-(run.stop - run.start) // ALIGN_BYTES)
        first = run.start + num_lines * member // num_members * ALIGN_BYTES
        last = min(run.stop, run.start + num_lines * (member + 1) // num_members * ALIGN_BYTES)
        if first < last:
            runs.append(Stretch(run.dtype, first, last))
    return runs


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Share:
    """One member's part of the update of the current block.

    Args:
        seat: whose share it is.
        block: number of the block with the parameters; the other one holds the undo copies.
        fragments: are updated at different times.

    Attributes:
        due: the fragment that is updated now; the rest of this share stays as it is.
        is_alone: whether the run has only this member.
        mean: memory of the mean, at the layout's offsets.
        ranges: byte ranges of this share's parameters, with the padding of their last line.
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
        control = self._control = store.control
        self._mark, self._count = control.marks[seat], control.kept[seat]
        self._store, self._replica = store, replica
        self._buffers = replica.layout.buffers.places
        self.is_alone = control.num_seats == 1
        self.mean = store.slot(seat) if self.is_alone else store.sum_slot
        ranges = split_shares(replica.layout, rule, control.num_seats, fragments.each)[seat]
        self.ranges = [(run.start, _aligned(run.stop)) for run in ranges]
        parts = list(cut(ranges, rule))
        scratch = scratch_for(parts, rule)
        self._chunks = [
            ShareChunk(store, replica, rule, part, block=block, mean=self.mean, scratch=scratch)
            for part in parts
        ]

    def _due(self) -> list[ShareChunk]:
        """Return the chunks of the next update."""
        due = self.due
        if due is self._whole:
            return self._chunks
        return [chunk for chunk in self._chunks if due.start <= chunk.at < due.stop]

    def average(self, weights: Sequence[float]) -> float:
        """Make the weighted mean of all slots' gradients in this share.

        Returns:
            Its plain sum, which is not finite if an element is not.
        """
        check = 0.0
        for chunk in self._due():
            if not self.is_alone:
                chunk.average(weights)
            check += chunk.sum()
        return check

    def squared_norm(self) -> float:
        return math.fsum(chunk.squared_norm() for chunk in self._due())

    def scale(self, factor: float) -> None:
        for chunk in self._due():
            chunk.scale(factor)

    def update(
        self,
        mark: int,
        step: Callable[[ShareChunk], None],
        *,
        weights: Sequence[float] | None = None,
        most: float = math.inf,
    ) -> float:
        """Step on all chunks, each copied before it changes.

        Args:
            mark: the version that this update makes.
            weights: of the mean that is made first; None: it was made already.
            most: what its elements are clipped to.

        Returns:
            The plain sum of the mean, which is not finite if an element is not.
        """
        check, control = 0.0, self._control
        if not self.is_alone:
            control[self._count] = 0
            control[self._mark] = mark
        for number, chunk in enumerate(self._due(), 1):
            if weights is not None:
                chunk.average(weights, stays=False)
                check += chunk.sum()
            if most < math.inf:
                chunk.clamp(most)
            if not self.is_alone:
                chunk.keep()
                control[self._count] = number
            step(chunk)
        return check

    def restore(self, mark: int) -> None:
        """Undo what ``update`` changed in this share, if that was for ``mark``."""
        control = self._control
        if control[self._mark] == mark:
            for chunk in self._due()[: control[self._count]]:
                chunk.restore()
            control[self._mark] = 0

    def average_buffers(self, weights: Sequence[float]) -> None:
        """Write into the model's buffers the mean by samples, or the maximum of counters."""
        seats = [seat for seat, weight in enumerate(weights) if weight]
        if not seats:
            return
        seat_weights = [weights[seat] for seat in seats]
        for buffer, place in zip(self._replica.buffers, self._buffers, strict=True):
            parts = [place.view(self._store.slot(seat)) for seat in seats]
            buffer.copy_(average_of_buffers(parts, seat_weights))


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
        """Move the weights to the shared block, where others read them."""
        if not self._copy.is_difference:
            self._replica.live_in(self._live)
            self._copy.unedited.watch(self._live, self._share.ranges)
            self._copy.unedited.mark(self._copy.home)  # others may already write to the block

    def step_aside(self) -> None:
        """Between epochs the weights are in private memory."""
        if not self._copy.is_difference:
            self._replica.live_in(self._copy.home)
            self._copy.unedited.watch(self._copy.home)
            self._copy.unedited.mark()

    def standing(self) -> tuple[Tensor, Tensor]:
        # Weights that were published between epochs are in the other block.
        return self._store.blocks[self._store.current], self.kept_buffers

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
        """Average this member's share of all gradients, and step the optimizer on it.

        Another member's share may not be finite: several members all step, and then undo it.
        """
        share, version = self._share, self._copy.version
        if self._copy.is_lockstep:
            self._adopt(weights)
            return
        share.due = self._copy.own.due
        is_whole_first = share.is_alone or clip.has_norm
        is_bad = is_whole_first and self._is_bad(share.average(weights))
        if is_bad and share.is_alone:
            self._hooks.advance_schedule(version)
            return
        if clip.has_norm:
            self._clip(clip)
        self._hooks.advance_schedule(version)
        groups = self._copy.rule.param_groups
        check = share.update(
            version + 1,
            lambda chunk: chunk.step(present, groups),
            weights=None if is_whole_first else weights,
            most=clip.max_value if clip.has_value else math.inf,
        )
        self._is_bad(check)
        share.average_buffers(weights)
        if not self._copy.is_difference:
            self._copy.unedited.mark()

    def _adopt(self, weights: Sequence[float]) -> None:
        """Take the parameters of the first who pushed: all made the same step by themselves."""
        share, version = self._share, self._copy.version
        if share.is_alone and self._is_bad(share.average(weights)):
            return
        first = None if share.is_alone else only_first(weights)
        self._is_bad(share.update(version + 1, ShareChunk.adopt, weights=first))
        share.average_buffers(weights)

    def _is_bad(self, check: float) -> bool:
        """Return whether a sum over the mean is not finite, and tell all members if so."""
        if math.isfinite(check):
            return False
        self._barrier.show_bad(self._copy.version)
        return True

    def _mean_of_gradients(self, weights: Sequence[float]) -> Tensor:
        self._share.average(weights)
        return self._share.mean

    def _clip(self, clip: Clip) -> None:
        """Clip the mean gradient by its whole norm, with one more barrier."""
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
