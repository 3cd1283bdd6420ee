"""The optimizer's step on a spread model: each worker on its part, all at the same version.

    .grad of a part   = sum over its copy of share x gradient     (pipeline.py, as they came back)
    mean              = sum over copies of (samples of the copy / of all) x that
    tied parameters   their gradients in all parts are added up: each holds a copy of them

What one part finds (a gradient that is not finite, its share of the norm) all parts must know
before any of them steps. This module must not know protocols.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from ..exchange import Route
from ..exchange.base import End, ScriptHooks, Work
from ..exchange.distributed import DistributedAveraging
from ..exchange.group import MemberGroup
from ..exchange.model_copy import ModelCopy
from ..exchange.rounds import Barrier, Line
from ..store.clip import Clip
from ..store.sums import carried, has_mean, norm_of
from ..system.pages import give_back_freed
from .base import SpreadModel
from .group import tell_all

_SAME_SHARE = 1e-9


class SplitAveraging(DistributedAveraging):
    """Members that each hold a part of the model.

    Args:
        spread: this worker's side of it.
    """

    def __init__(
        self, spread: SpreadModel, copy: ModelCopy, barrier: Barrier, hooks: ScriptHooks
    ) -> None:
        self._spread, self._has_stepped = spread, False
        super().__init__(copy, barrier, hooks, Route(collective="native"))
        parameters = self._replica.layout.parameters
        self._tied = {
            one.name: one.flat(self._mean) for one in parameters.places if one.name in spread.shared
        }
        self._counted = [one for one in parameters.places if one.name in spread.counted]
        """Whose norm is counted here: of a tied one only one copy is."""
        spread.num_hooked = lambda: self._replica.num_hooked
        spread.whole.standing.stands(copy.version)
        give_back_freed()

    def _make_own(self) -> Tensor:
        """The store's own block: nobody else reads it, and one copy of a part is enough."""
        return self._store.blocks[self.block]

    def _give_to_store(self) -> None:
        """It is there."""

    def _make_group(self, route: Route) -> MemberGroup:
        return self._spread.groups.twins or self._spread.groups.copy

    def refuse(self, what: str, *, is_over: bool = False) -> None:
        if not is_over:
            raise ConfigError(
                f"{what} is not carried where a model is split: all workers compute each step "
                "together; use --split data"
            )

    def fill(self, work: Work) -> None:
        """Nobody shows a push before all are at it; who has no mini-batch has others' gradients."""
        if not work.num_samples:
            self._replica.drop_gradients()
        self._replica.held.take_buffers()
        self._spread.come_to_end(End.PUSH, work.num_samples)
        super().fill(work)
        if not work.num_samples:
            self._fill(work)
            is_scaled = self._store.scales.standing(self._copy.version) is not None
            work.found_inf = is_scaled and not self._are_finite(self._runs())

    def update(self, lines: Sequence[Line]) -> None:
        self._spread.whole.standing.changes()
        super().update(lines)

    def settle(self) -> int:
        fault = super().settle()
        if not self._pushed.num_samples:  # its script knows nothing of them, and clears none
            self._replica.drop_gradients()
        self._spread.whole.standing.stands(self._copy.version + 1)
        return fault

    def _present_in_any(self, weights: Sequence[float]) -> Sequence[int]:
        """Only of this part; of all copies, with the buffers that scripts have changed in any."""
        mine, spread = bytes(self._store.present(self._seat)), self._spread
        changed = [spread.changed_buffers >> one & 1 for one in range(len(spread.buffers))]
        found = torch.tensor([*mine, *changed], dtype=torch.uint8)
        if spread.groups.twins is not None:
            spread.groups.twins.all_reduce(found, is_maximum=True).wait()
        changed = found[len(mine) :].tolist()
        spread.changed_buffers = sum(is_other << one for one, is_other in enumerate(changed))
        found = found[: len(mine)]
        if not self._spread.shared_sizes:
            return found.tolist()
        names = [one.name for one in self._replica.layout.parameters.places]
        own = {name: number for number, name in enumerate(names)}
        tied = torch.tensor(
            [int(found[own[name]]) if name in own else 0 for name, *_ in self._spread.shared_sizes],
            dtype=torch.uint8,
        )
        self._spread.groups.copy.all_reduce(tied, is_maximum=True).wait()
        for (name, *_), is_there in zip(self._spread.shared_sizes, tied.tolist(), strict=True):
            if name in own:
                found[own[name]] = is_there
        return found.tolist()

    def _unscale(self) -> None:
        """Who had no mini-batch has no scaler at work: its gradients are of scaled losses."""
        scale = self._store.scales.standing(self._copy.version)
        if scale is not None and not self._pushed.num_samples:
            for run in self._runs():
                run.mul_(1.0 / scale.value)

    def _step(self, weights: Sequence[float], present: Sequence[int], clip: Clip) -> None:
        spread = self._spread
        self._unscale()
        own = sum(weights[seat] for seat in spread.groups.members)
        self._check_shares([weights[seat] for seat in spread.groups.members], own)
        for number, place in enumerate(self._replica.layout.parameters.places):
            if not self._store.present(self._seat)[number]:
                place.flat(self._mean).zero_()
        runs = self._runs()
        if spread.groups.twins is not None:
            self._reduce_all(runs, own)
        for name, kind, numel in spread.shared_sizes:
            total = self._tied.get(name, torch.zeros(0))
            if not total.numel():  # of others alone
                total = torch.zeros(numel, dtype=kind)
            with self._told_of_deaths():
                spread.groups.copy.all_reduce(total).wait()
        self._is_bad, squared = self._found_in_all(runs, clip)
        if self._is_bad:
            return
        if clip.has_norm:
            self.norm = math.sqrt(squared)
        for run in runs:
            if (factor := clip.factor(self.norm)) != 1.0:
                run.mul_(factor)
            if clip.has_value:
                run.clamp_(-clip.max_value, clip.max_value)
        self._hooks.advance_schedule(self._copy.version)
        self._updater.step(self._mean, present, self._copy.rule.param_groups)
        self._stepped()
        if spread.changed_buffers:
            self._reduce_changed(weights[self._seat], own)
        if spread.groups.twins is not None:
            self._reduce_buffers(own)
        elif spread.sums_buffers:
            self._reduce_buffers(weights[self._seat])
        spread.mark_buffers()
        self._copy.unedited.mark()

    def _reduce_changed(self, weight: float, own: float) -> None:
        """What a script has changed in each worker has its mean, as where nothing is split.

        Args:
            weight: of this worker's push; ``own``: of all of its copy's.
        """
        of_part = {id(one) for one in self._replica.buffers}
        share = weight / own if own else 0.0
        for number, one in enumerate(self._spread.buffers):
            if not self._spread.changed_buffers >> number & 1:
                continue
            is_counter = not has_mean(one.dtype)
            total = one.detach().to(torch.int64 if is_counter else carried(one.dtype))
            if not is_counter:  # of one that weighs nothing it may be nan
                total = total * share if share else torch.zeros_like(total)
            total = total.contiguous()
            with self._told_of_deaths():
                self._spread.groups.copy.all_reduce(total, is_maximum=is_counter).wait()
            if self._spread.groups.twins is not None and id(one) not in of_part:
                self._reduce(total, None if is_counter else own)  # of the others all twins have it
            with torch.no_grad():
                one.copy_(total)

    def _found_in_all(self, runs: Sequence[Tensor], clip: Clip) -> tuple[bool, float]:
        """Whether a gradient of any part is not finite; the norm's square, where it is wanted."""
        counted = [one.flat(self._mean) for one in self._counted]
        is_bad = not self._are_finite(runs)
        wants_norm = clip.has_norm and counted and not is_bad
        squared = norm_of(counted) ** 2 if wants_norm else 0.0
        found = torch.tensor([float(is_bad), squared], dtype=torch.float64)
        with self._told_of_deaths():
            self._spread.groups.copy.all_reduce(found).wait()
        return bool(found[0]), float(found[1])

    def _bad_name(self) -> str:
        """All parts have found that the mean is not finite, and some of them where."""
        with self._told_of_deaths():
            names = tell_all(self._spread.groups.copy, super()._bad_name())
        return next((one for one in names if one), "")

    def _stepped(self) -> None:
        if not self._has_stepped:  # the optimizer's state was made anew, and moved to the block
            self._has_stepped = True
            give_back_freed()
        self._spread.stepped()

    def _check_shares(self, weights: Sequence[float], own: float) -> None:
        """Raise ConfigError where a loss was weighed otherwise than its push is."""
        used = self._spread.take_shares()
        if used is None or not own:
            return
        if any(abs(a / own - b) > _SAME_SHARE for a, b in zip(weights, used, strict=True)):
            raise ConfigError(
                "step.weight is not carried where a model is split: gradients are weighed by the "
                "samples of each worker's mini-batch as they are computed; use --split data"
            )
