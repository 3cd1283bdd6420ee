"""The mean over ranks, on its way while the backward pass still computes.

    backward   layer 3 | layer 2 | layer 1 | step: lines | wait | optimizer
    group              [bucket 0 ][bucket 1 ][bucket 2]

A bucket is a stretch of the gradients, the last layers' first. As soon as the hooks have left all
of them a copy is multiplied by this rank's share of the mean, as the last round had it, and its sum
over ranks begins. All ranks begin the buckets of a round in one order, each once, a rank without a
mini-batch with zeros; so they fit, whatever a script does between.

A sum is only right where the step is of that backward pass alone. Each rank looks at its gradients
when it pushes: where they were written since (a second backward pass, an edit, a clip of its own)
it says so beside its line. Where one has, or somebody's share was another one, all make the mean
anew from what they push.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB
2020, sections 3.2 and 4.2 (buckets, their order and sizes). There is no search for unused
parameters here: their bucket begins at the push. This module must not know protocols.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...compression.base import AllReduce, Exchanging, UnderWay
from ...errors import ConfigError
from ...exchange import BUCKET_BYTES, FIRST_BUCKET_BYTES, Route
from ...exchange.base import ScriptHooks, Work
from ...exchange.compressed import CompressedGradient, GroupLink, Span
from ...exchange.distributed import DistributedAveraging
from ...exchange.group import MemberGroup
from ...exchange.model_copy import ModelCopy
from ...exchange.rounds import Barrier, Line
from ...exchange.scheduled import along
from ...store.layout import Section
from .group import RankGroup
from .member import GatheredLines

_OLD = -1.0
"""In place of a share: the gradients were written after their sum had begun."""
_MOST_IN_VAIN = 2
"""Rounds in a row; then the script has more than a backward pass for a step, and buckets wait."""


class Bucket(NamedTuple):
    """A part of the gradients, whose sum is begun at once.

    Attributes:
        numbers: of the parameters in it.
    """

    span: Span
    numbers: tuple[int, ...]


class RankAveraging(DistributedAveraging):
    """Peers whose gradients are averaged over the ranks' own group."""

    def __init__(
        self,
        group: RankGroup,
        copy: ModelCopy,
        barrier: Barrier,
        hooks: ScriptHooks,
        collective: str,
    ) -> None:
        assert isinstance(barrier, GatheredLines)  # the carrier's own (member.py)
        self._lines, self._ranks = barrier, group
        self._overlaps = not (copy.is_difference or copy.is_lockstep)
        self._buckets = make_buckets(copy.replica.layout.parameters) if self._overlaps else []
        super().__init__(copy, barrier, hooks, Route(collective=collective))
        if self._overlaps:
            self._gathered, self._mean = self._mean, torch.zeros_like(self._mean)
            self._bucket_of = {
                number: index for index, one in enumerate(self._buckets) for number in one.numbers
            }
            self._share, self._total, self._num_vain = 0.0, 0.0, 0
            self.come_back()

    def _make_group(self, route: Route) -> MemberGroup:
        return along(route.collective, self._ranks, is_apart=True)

    def refuse(self, what: str, *, is_over: bool = False) -> None:
        if not is_over:
            raise ConfigError(
                f"{what} is not carried by engine torchrun, where workers share no memory; start "
                f"it on one machine: paceline launch --workers {self._store.control.num_seats} "
                "SCRIPT"
            )

    def _spans(self) -> list[Span]:
        return [one.span for one in self._buckets] or super()._spans()

    @property
    def _source(self) -> Tensor:
        return self._gathered if self._overlaps else self._mean

    # -- while the backward pass computes -------------------------------------------------------

    def _begin_round(self) -> None:
        self._under_way = UnderWay(GroupLink(self._group))
        self._missing = [
            sum(self._replica.parameters[number].requires_grad for number in one.numbers)
            for one in self._buckets
        ]
        self._seen: dict[int, int] = {}
        """Per parameter: how often its gradient had been written when its bucket began."""

    def _arrived(self, number: int) -> None:
        """A hook has left this gradient."""
        self._missing[self._bucket_of[number]] -= 1
        while self._share and len(self._under_way) < len(self._buckets):
            if self._missing[len(self._under_way)] > 0:
                return
            self._begin(self._share)

    def _begin(self, share: float) -> None:
        """Of the next bucket; ``share``: of this rank's gradient in the mean."""
        index = len(self._under_way)
        bucket = self._buckets[index]
        if self._compressed is None:
            exchanging = _as_they_are(bucket.span, self._gathered, share, self._mean)
        else:
            exchanging = self._compressed.begin(index, self._gathered, share, self._mean)
        versions = self._replica.write_count
        self._seen |= {number: versions(number) for number in bucket.numbers}
        self._under_way.begin(exchanging)

    # -- epochs ---------------------------------------------------------------------------------

    def come_back(self) -> None:
        """Nothing is under way between epochs: a rank may compute there what no other does."""
        if self._overlaps:
            self._num_vain = 0
            self._begin_round()
            self._replica.arrived = self._arrived

    def step_aside(self) -> None:
        self._give_back()
        super().step_aside()

    # -- a round --------------------------------------------------------------------------------

    def fill(self, work: Work) -> None:
        """From here on this rank's part is as it is: the rest of it goes on its way."""
        super().fill(work)
        if not self._overlaps:
            return
        weight = work.weight if work.num_samples else 0.0
        has_begun, count = len(self._under_way) > 0, self._replica.write_count
        is_old = any(count(number) != seen for number, seen in self._seen.items())
        if has_begun:
            share = self._share
            self._num_vain = self._num_vain + 1 if is_old else 0
        else:
            share = weight / self._total if self._total else 1.0
        while len(self._under_way) < len(self._buckets):
            self._begin(share if weight else 0.0)
        self._lines.show_share(_OLD if is_old else share if weight or has_begun else 0.0)

    def update(self, lines: Sequence[Line]) -> None:
        if self._overlaps:
            self._finish()
            self._total = sum(line.weight for line in lines)
            shares = [line.weight / self._total if self._total else 0.0 for line in lines]
            self._must_redo = shares != self._lines.shares()
            is_worth_it = self._num_vain < _MOST_IN_VAIN
            self._share = shares[self._seat] if is_worth_it else 0.0
        super().update(lines)
        if self._overlaps:
            self._begin_round()

    def _reduce_all(self, runs: Sequence[Tensor], weight: float) -> None:
        if not self._overlaps:
            super()._reduce_all(runs, weight)
        elif self._must_redo:
            size = self._replica.layout.parameters.stop
            self._mean[:size].copy_(self._gathered[:size])
            super()._reduce_all(runs, weight)

    def _reduce_compressed(self, compressed: CompressedGradient, weight: float) -> None:
        """What was begun with another share has changed no residual, and begins anew."""
        if not self._overlaps or self._must_redo:
            super()._reduce_compressed(compressed, weight)

    def _reduce_buffers(self, weight: float) -> None:
        """Those of one type of numbers together."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for one in self._replica.buffers:
            kinds.setdefault(one.dtype, []).append(one)
        for dtype, buffers in kinds.items():
            together = torch.cat([one.reshape(-1) for one in buffers])
            self._reduce(together, weight if dtype.is_floating_point else None)
            parts = torch.split(together, [one.numel() for one in buffers])
            for one, part in zip(buffers, parts, strict=True):
                one.copy_(part.view(one.shape))

    def _finish(self) -> None:
        self._under_way.finish()

    # -- the way out ----------------------------------------------------------------------------

    def give_up(self, work: Work, *, is_updating: bool) -> None:
        self._give_back()
        super().give_up(work, is_updating=is_updating)

    def hand_over(self) -> None:
        self._give_back()
        super().hand_over()

    def _give_back(self) -> None:
        """What is under way ends; from now on gradients go nowhere."""
        if self._overlaps:
            self._finish()
            self._replica.arrived = None


def make_buckets(section: Section) -> list[Bucket]:
    """The gradients in buckets, the last parameters' first: theirs are there first."""
    buckets: list[Bucket] = []
    numbered = list(enumerate(section.places))
    for dtype, start, stop in reversed(list(section.runs())):
        inside = [(n, one) for n, one in numbered if start <= one.offset < stop]
        end, numbers = stop, list[int]()
        for number, place in reversed(inside):
            numbers.append(number)
            most = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            if end - place.offset >= most or place.offset == start:
                buckets.append(Bucket(Span(place.offset, end, dtype), tuple(numbers)))
                end, numbers = place.offset, []
    return buckets


def _as_they_are(span: Span, source: Tensor, share: float, mean: Tensor) -> Exchanging:
    """The sum of a bucket that nothing compresses."""
    out = span.of(mean)
    if share:
        torch.mul(span.of(source), share, out=out)
    else:
        out.zero_()
    yield AllReduce(out)
