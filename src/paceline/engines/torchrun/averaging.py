"""The mean over ranks, overlapped with the backward pass.

    backward   layer 3 | layer 2 | layer 1 | step | wait         | optimizer
    group              [bucket 0 ][bucket 1 ]     [lines, bucket 2]

A bucket is a slice of the mean, the last layers' first. Gradients stay where torch puts them: a
hook multiplies each, while it is in the cache, by this rank's share of the mean in the last round
and writes it to its place in the mean. Once a bucket is complete, its sum over ranks starts. All
ranks start the buckets of a round in the same order, each once, a rank without a mini-batch with
zeros; so the sums match, whatever a script does in between.

A sum is right only if the step uses that backward pass alone. Each rank checks its gradients when
it pushes: if they have changed since (a second backward pass, an edit, clipping in the script) it
reports that beside its line. If any rank's have, or any share differs from the last round's, all
recompute the mean from their pushes. A compressed bucket is encoded instead of multiplied; the
residual of a discarded first try is discarded, too.

Between CPUs the last bucket, which is complete just before the push, waits for it, is multiplied as
a whole, and carries the lines of all ranks: a small model's sum takes as long as one more
collective. An unused parameter's bucket starts at the push. Source: as in buckets.py.
Above 300 lines, since a sum and the reasons to make it again are read together. It must not know
protocols.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...compression.base import AllReduce, Exchanging, UnderWay
from ...errors import ConfigError
from ...exchange import SHARED, Route
from ...exchange.base import ScriptHooks, Work
from ...exchange.compressed import CompressedGradient, GroupLink, Span
from ...exchange.distributed import DistributedAveraging
from ...exchange.group import MemberGroup
from ...exchange.model_copy import ModelCopy
from ...exchange.rounds import Barrier, Line
from ...exchange.scheduled import along
from ...replica.own_gradients import OwnGradients
from ...store.sums import are_finite
from .buckets import Bucket, LinesAlong, make_buckets
from .group import RankGroup
from .member import GatheredLines

_STALE = -1.0
"""Instead of a share: the gradients were changed after their sum had started."""
_CHECK_EVERY = 8  # gradients between checks for cancellation: one costs as much as the hook
_MAX_WASTED = 2  # wasted rounds in a row, as with two backward passes a step; then buckets wait


class Sent(NamedTuple):
    """The gradient whose share is in the mean; referenced, so that its address is not reused.

    Attributes:
        version: torch's counter of its in-place changes.
    """

    gradient: Tensor | None
    version: int
    address: int


class RankAveraging(DistributedAveraging):
    """Averages the gradients of peers over the ranks' own group."""

    def __init__(
        self,
        group: RankGroup,
        copy: ModelCopy,
        barrier: Barrier,
        hooks: ScriptHooks,
        route: Route,
    ) -> None:
        assert isinstance(barrier, GatheredLines)  # the carrier's own (member.py)
        self._lines, self._ranks = barrier, group
        self._overlaps = not (copy.is_difference or copy.is_lockstep)
        self._buckets = list[Bucket]()
        if self._overlaps:
            self._buckets = make_buckets(copy.replica.layout.parameters, copy.replica.device)
        super().__init__(copy, barrier, hooks, route)
        if self._overlaps:
            self._along = self._take_lines_along()
            lines = self._along
            self._mean = self._zeros(self._mean) if lines is None else lines.mean
            places = self._replica.layout.parameters.places
            self._views = [place.view(self._mean) for place in places]
            buckets = enumerate(self._buckets)
            self._bucket_of = {n: index for index, bucket in buckets for n in bucket.numbers}
            self._share, self._total, self._num_wasted = 0.0, 0.0, 0
            self._own_grads = OwnGradients(self._replica)
            self._replica.leave_to(self._own_grads)
            self.come_back()

    def _take_lines_along(self) -> LinesAlong | None:
        """Return the buffer for summing lines and gradients in one; None if they do not fit."""
        if not self._buckets or self._replica.device.type != "cpu" or self._compressed is not None:
            return None
        num_bytes, last = self._lines.num_bytes, self._buckets[-1].span
        if not LinesAlong.fits(num_bytes, last):
            return None
        self._lines.take_along = self._bring_lines
        return LinesAlong(num_bytes, last, len(self._mean), self._group.zeros)

    def _make_own(self) -> Tensor:
        """Return this rank's parameters: on a CPU the store's block, which nobody else reads."""
        self._lines.settle()
        return self._store.blocks[self.block].to(self._replica.device)

    def _make_group(self, route: Route) -> MemberGroup:
        if route.collective == SHARED:
            return self._ranks.in_shared_memory()
        return along(route.collective, self._ranks, is_apart=True)

    def refuse(self, what: str, *, is_over: bool = False) -> None:
        if not is_over:
            raise ConfigError(
                f"{what} is not supported by engine torchrun, where workers have no common store; "
                f"run it on one machine: paceline launch --workers {self._store.control.num_seats} "
                "SCRIPT"
            )

    def _spans(self) -> list[Span]:
        return [bucket.span for bucket in self._buckets] or super()._spans()

    # -- during the backward pass ---------------------------------------------------------------

    def _begin_round(self) -> None:
        self._under_way = UnderWay(GroupLink(self._group))
        self._missing = [
            sum(self._replica.parameters[number].requires_grad for number in bucket.numbers)
            for bucket in self._buckets
        ]
        self._sent: dict[int, Sent] = {}
        self._num_edits = self._own_grads.num_edits
        self._sums: list[Tensor] = []
        """The sum of each bucket of the mean."""
        self._last_share: float | None = None
        """This rank's share in the bucket that carries the lines, from the push to its start."""

    def _arrived(self, number: int) -> None:
        """Handle a gradient that the backward pass has accumulated."""
        if number % _CHECK_EVERY == 0:
            self._replica.check()
        index = self._bucket_of[number]
        if not self._share or not len(self._under_way) <= index < self._num_alone:
            return
        self._multiply(number, self._share)
        self._missing[index] -= 1
        while len(self._under_way) < self._num_alone:
            if self._missing[len(self._under_way)] > 0:
                return
            self._begin(self._share)

    @property
    def _num_alone(self) -> int:
        """How many buckets start without the lines, as soon as they are complete."""
        return len(self._buckets) - (self._along is not None)

    def _multiply(self, number: int, share: float) -> None:
        gradient = self._replica.parameters[number].grad
        if gradient is None:
            self._views[number].zero_()
            self._sent[number] = Sent(None, 0, 0)
        else:
            self._replica.refuse_sparse(number, gradient)
            torch.mul(gradient.detach(), share, out=self._views[number])
            self._sent[number] = Sent(gradient, gradient._version, gradient.data_ptr())

    def _begin(self, share: float) -> None:
        """Start the sum of the next bucket; ``share``: this rank's share of the mean."""
        index = len(self._under_way)
        bucket = self._buckets[index]
        if share and index == self._num_alone:
            bucket.multiply(self._replica.parameters, self._views, share)
        elif share:
            for number in [number for number in bucket.numbers if not self._is_sent(number)]:
                self._multiply(number, share)
        if self._compressed is not None:  # its input is multiplied by the share already
            exchanging = self._compressed.begin(index, self._mean, float(share > 0.0), self._mean)
        else:
            exchanging = self._as_it_is(bucket.span.of(self._mean), has_part=share > 0.0)
        self._under_way.begin(exchanging)

    def _as_it_is(self, part: Tensor, *, has_part: bool) -> Exchanging:
        """Sum an uncompressed bucket over ranks; its total is added up while later ones travel."""
        if not has_part:
            part.zero_()
        lines = self._along if len(self._under_way) == self._num_alone else None
        yield AllReduce(part) if lines is None else AllReduce(lines.whole, at_once=True)
        self._sums.append(part.sum())

    def _bring_lines(self, own_line: Tensor, all_lines: Tensor) -> bool:
        """Gather the lines with the last bucket, at a round's end; see ``GatheredLines``."""
        if self._along is None or self._last_share is None:
            return False
        self._along.put(self._seat, own_line)
        self._begin(self._last_share)
        self._last_share = None
        self._under_way.finish()
        self._along.read(all_lines)
        return True

    def _is_sent(self, number: int) -> bool:
        """Return whether the mean has the share of the gradient as it is now."""
        gradient, sent = self._replica.parameters[number].grad, self._sent.get(number)
        if sent is None or gradient is None or gradient is not sent.gradient:
            return sent is not None and gradient is sent.gradient
        return (gradient._version, gradient.data_ptr()) == (sent.version, sent.address)

    # -- epochs ---------------------------------------------------------------------------------

    def come_back(self) -> None:
        """Start again after the time between epochs, in which a rank may compute by itself."""
        if self._overlaps:
            self._num_wasted = 0
            self._begin_round()
            self._own_grads.arrived = self._arrived

    def step_aside(self) -> None:
        self._end_round()
        super().step_aside()

    # -- a round --------------------------------------------------------------------------------

    def fill(self, work: Work) -> None:
        """Start the sums that have not started yet: this rank's gradients are final."""
        super().fill(work)
        if not self._overlaps:
            return
        weight = work.weight if work.num_samples else 0.0
        if self._num_edits != self._own_grads.num_edits:
            self._sent.clear()
        started = self._buckets[: len(self._under_way)]
        is_stale = not all(self._is_sent(n) for bucket in started for n in bucket.numbers)
        if started:
            share = self._share
            self._num_wasted = self._num_wasted + 1 if is_stale else 0
        else:
            share = weight / self._total if self._total else 1.0
            if share != self._share:
                self._sent.clear()
        while len(self._under_way) < self._num_alone:
            self._begin(share if weight else 0.0)
        self._last_share = (share if weight else 0.0) if self._along is not None else None
        self._lines.show_share(_STALE if is_stale else share if weight or started else 0.0)

    def update(self, lines: Sequence[Line]) -> None:
        if self._overlaps:
            self._under_way.finish()
            self._total = sum(line.weight for line in lines)
            shares = [line.weight / (self._total or 1.0) for line in lines]
            self._must_redo = shares != self._lines.shares()
            self._share = shares[self._seat] if self._num_wasted < _MAX_WASTED else 0.0
        super().update(lines)
        if self._overlaps:
            self._begin_round()

    def _reduce_all(self, runs: Sequence[Tensor], weight: float) -> None:
        if not self._overlaps:
            super()._reduce_all(runs, weight)
        elif self._must_redo:
            self._gather()
            super()._reduce_all(runs, weight)

    def _reduce_compressed(self, compressed: CompressedGradient, weight: float) -> None:
        """Compress and sum again if the share was another one; no residual has changed by then."""
        if self._overlaps and not self._must_redo:
            return
        if self._overlaps:
            self._gather()
        super()._reduce_compressed(compressed, weight)

    def _gather(self) -> None:
        """Copy this rank's gradients, unscaled, to their places in the mean."""
        for number in range(len(self._views)):
            self._multiply(number, 1.0)

    def _are_finite(self, runs: Sequence[Tensor]) -> bool:
        has_sums = self._overlaps and self._compressed is None and not self._must_redo
        return (has_sums and are_finite(self._sums)) or super()._are_finite(runs)

    # -- the way out ----------------------------------------------------------------------------

    def give_up(self, work: Work, *, is_updating: bool) -> None:
        self._give_back()
        super().give_up(work, is_updating=is_updating)

    def hand_over(self) -> None:
        self._give_back()
        super().hand_over()

    def _end_round(self) -> None:
        """Finish the sums under way; gradients that arrive from now on are not sent."""
        if self._overlaps:
            self._under_way.finish()
            self._own_grads.arrived = None

    def _give_back(self) -> None:
        """Stop overlapping for good, and gather gradients for the store."""
        if self._overlaps:
            self._end_round()
            self._replica.gather_anew()
