"""The mean over ranks, on its way while the backward pass still computes.

    backward   layer 3 | layer 2 | layer 1 | step | wait         | optimizer
    group              [bucket 0 ][bucket 1 ]     [lines, bucket 2]

A bucket is a stretch of the mean, the last layers' first. Gradients stay where torch makes them: a
hook multiplies each, still warm, by this rank's share of the mean, as the last round had it, into
its place there, and as soon as a bucket has all of its own its sum over ranks begins. All ranks
begin the buckets of a round in one order, each once, a rank without a mini-batch with zeros; so
they fit, whatever a script does between.

A sum is only right where the step is of that backward pass alone. Each rank looks at its gradients
when it pushes: where they were written since (a second backward pass, an edit, a clip of its own)
it says so beside its line. Where one has, or somebody's share was another one, all make the mean
anew from what they push. A compressed bucket is encoded where an uncompressed one is multiplied;
what its first try has left over counts as little as the sum does.

Between CPUs the last bucket, which is there just before the push, waits for it, is multiplied as a
whole, and takes the lines of all along: a small model's sum takes as long as another collective.
An unused parameter's bucket begins at the push. Source: buckets.py's. It must not know protocols.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...compression.base import AllReduce, Exchanging, UnderWay
from ...errors import ConfigError
from ...exchange import Route
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

_OLD = -1.0
"""In place of a share: the gradients were written after their sum had begun."""
_CHECKED = 8  # each eighth gradient asks whether the step is to be left: as dear as its hook
_MOST_IN_VAIN = 2  # rounds in a row: a script with more than a backward pass a step; buckets wait


class Sent(NamedTuple):
    """Which gradient has its share in the mean; held, so that no other one comes to lie there.

    Attributes:
        version: its counter of changes.
    """

    gradient: Tensor | None
    version: int
    address: int


class RankAveraging(DistributedAveraging):
    """Peers whose gradients are averaged over the ranks' own group."""

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
            self._mean = torch.zeros_like(self._mean) if self._along is None else self._along.mean
            places = self._replica.layout.parameters.places
            self._views = [place.view(self._mean) for place in places]
            buckets = enumerate(self._buckets)
            self._bucket_of = {n: index for index, bucket in buckets for n in bucket.numbers}
            self._share, self._total, self._num_vain = 0.0, 0.0, 0
            self._own_grads = OwnGradients(self._replica)
            self._replica.leave_to(self._own_grads)
            self.come_back()

    def _take_lines_along(self) -> LinesAlong | None:
        """Where lines and gradients become one sum; None: they do not."""
        if not self._buckets or self._replica.device.type != "cpu" or self._compressed is not None:
            return None
        num_bytes, last = self._lines.num_bytes, self._buckets[-1].span
        if not LinesAlong.fits(num_bytes, last):
            return None
        self._lines.take_along = self._bring_lines
        return LinesAlong(num_bytes, last, len(self._mean))

    def _make_own(self) -> Tensor:
        """On a CPU the store's own block: nobody else reads this store."""
        self._lines.settle()
        return self._store.blocks[self.block].to(self._replica.device)

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
        return [bucket.span for bucket in self._buckets] or super()._spans()

    # -- while the backward pass computes -------------------------------------------------------

    def _begin_round(self) -> None:
        self._under_way = UnderWay(GroupLink(self._group))
        self._missing = [
            sum(self._replica.parameters[number].requires_grad for number in bucket.numbers)
            for bucket in self._buckets
        ]
        self._sent: dict[int, Sent] = {}
        self._num_edits = self._own_grads.num_edits
        self._sums: list[Tensor] = []
        """Of each bucket of the mean."""
        self._last_share: float | None = None
        """Of the bucket that takes the lines along, from the push until then."""

    def _arrived(self, number: int) -> None:
        """A backward pass has left this gradient."""
        if number % _CHECKED == 0:
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
        """How many buckets begin as soon as they can."""
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
        """Of the next bucket; ``share``: of this rank's gradient in the mean."""
        index = len(self._under_way)
        bucket = self._buckets[index]
        if share and index == self._num_alone:
            bucket.multiply(self._replica.parameters, self._views, share)
        elif share:
            for number in [number for number in bucket.numbers if not self._is_sent(number)]:
                self._multiply(number, share)
        if self._compressed is not None:  # what it is given has its share already
            exchanging = self._compressed.begin(index, self._mean, float(share > 0.0), self._mean)
        else:
            exchanging = self._as_it_is(bucket.span.of(self._mean), has_part=share > 0.0)
        self._under_way.begin(exchanging)

    def _as_it_is(self, part: Tensor, *, has_part: bool) -> Exchanging:
        """The sum of a bucket that nothing compresses; looked at while the next ones come."""
        if not has_part:
            part.zero_()
        lines = self._along if len(self._under_way) == self._num_alone else None
        yield AllReduce(part) if lines is None else AllReduce(lines.whole, at_once=True)
        self._sums.append(part.sum())

    def _bring_lines(self, mine: Tensor, every: Tensor) -> bool:
        """With the last bucket, where this is the end of a round; see ``GatheredLines``."""
        if self._along is None or self._last_share is None:
            return False
        self._along.put(self._seat, mine)
        self._begin(self._last_share)
        self._last_share = None
        self._under_way.finish()
        self._along.read(every)
        return True

    def _is_sent(self, number: int) -> bool:
        """Whether the mean's place has a share of the gradient as it is now."""
        gradient, sent = self._replica.parameters[number].grad, self._sent.get(number)
        if sent is None or gradient is None or gradient is not sent.gradient:
            return sent is not None and gradient is sent.gradient
        return (gradient._version, gradient.data_ptr()) == (sent.version, sent.address)

    # -- epochs ---------------------------------------------------------------------------------

    def come_back(self) -> None:
        """Nothing is under way between epochs: a rank may compute there what no other does."""
        if self._overlaps:
            self._num_vain = 0
            self._begin_round()
            self._own_grads.arrived = self._arrived

    def step_aside(self) -> None:
        self._end_round()
        super().step_aside()

    # -- a round --------------------------------------------------------------------------------

    def fill(self, work: Work) -> None:
        """From here on this rank's part is as it is: the rest of it goes on its way."""
        super().fill(work)
        if not self._overlaps:
            return
        weight = work.weight if work.num_samples else 0.0
        if self._num_edits != self._own_grads.num_edits:
            self._sent.clear()
        begun = self._buckets[: len(self._under_way)]
        is_old = not all(self._is_sent(number) for one in begun for number in one.numbers)
        if begun:
            share = self._share
            self._num_vain = self._num_vain + 1 if is_old else 0
        else:
            share = weight / self._total if self._total else 1.0
            if share != self._share:
                self._sent.clear()
        while len(self._under_way) < self._num_alone:
            self._begin(share if weight else 0.0)
        self._last_share = (share if weight else 0.0) if self._along is not None else None
        self._lines.show_share(_OLD if is_old else share if weight or begun else 0.0)

    def update(self, lines: Sequence[Line]) -> None:
        if self._overlaps:
            self._under_way.finish()
            self._total = sum(line.weight for line in lines)
            shares = [line.weight / (self._total or 1.0) for line in lines]
            self._must_redo = shares != self._lines.shares()
            self._share = shares[self._seat] if self._num_vain < _MOST_IN_VAIN else 0.0
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
        """What was begun with another share has changed no residual, and begins anew."""
        if self._overlaps and not self._must_redo:
            return
        if self._overlaps:
            self._gather()
        super()._reduce_compressed(compressed, weight)

    def _gather(self) -> None:
        """This rank's whole gradients, where the mean goes."""
        for number in range(len(self._views)):
            self._multiply(number, 1.0)

    def _are_finite(self, runs: Sequence[Tensor]) -> bool:
        has_looked = self._overlaps and self._compressed is None and not self._must_redo
        return (has_looked and are_finite(self._sums)) or super()._are_finite(runs)

    # -- the way out ----------------------------------------------------------------------------

    def give_up(self, work: Work, *, is_updating: bool) -> None:
        self._give_back()
        super().give_up(work, is_updating=is_updating)

    def hand_over(self) -> None:
        self._give_back()
        super().hand_over()

    def _end_round(self) -> None:
        """What is under way ends; from now on gradients go nowhere."""
        if self._overlaps:
            self._under_way.finish()
            self._own_grads.arrived = None

    def _give_back(self) -> None:
        """What is under way ends for good, and gradients are gathered for the store."""
        if self._overlaps:
            self._end_round()
            self._replica.gather_anew()
