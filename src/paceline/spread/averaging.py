"""Step the optimizer on a spread model: each worker on its part, all at the same version.

    .grad of a part   = sum over its copy of share x gradient     (pipeline.py, as they came back)
    mean              = sum over copies of (samples of the copy / of all) x that
    tied parameters   their gradients in all parts are added up: each part holds a copy of them

Before any part steps, all parts must know of each whether its gradients are finite, and its share
of the norm. This module must not know protocols.
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
from .batch_norm import NormStatistics
from .group import tell_all

_SAME_SHARE = 1e-9


class SplitAveraging(DistributedAveraging):
    """The exchange of members that each hold a part of the model.

    Args:
        spread: this worker's side of the model.
    """

    def __init__(
        self, spread: SpreadModel, copy: ModelCopy, barrier: Barrier, hooks: ScriptHooks
    ) -> None:
        self._spread, self._has_stepped = spread, False
        super().__init__(copy, barrier, hooks, Route(collective="native"))
        parameters = self._replica.layout.parameters
        self._tied = {
            place.name: place.flat(self._mean)
            for place in parameters.places
            if place.name in spread.shared
        }
        self._counted = [place for place in parameters.places if place.name in spread.counted]
        """Parameters whose norm is counted here: of a tied one, one copy counts."""
        spread.num_hooked = lambda: self._replica.num_hooked
        spread.whole.standing.stands(copy.version)
        spread.norms.restart()
        give_back_freed()

    def _make_own(self) -> Tensor:
        """Return the store's own block: no other worker reads it, and one copy is enough."""
        return self._store.blocks[self.block]

    def _give_to_store(self) -> None:
        """Do nothing: the block is the store's."""

    def _make_group(self, route: Route) -> MemberGroup:
        return self._spread.groups.twins or self._spread.groups.copy

    def refuse(self, what: str, *, is_over: bool = False) -> None:
        if not is_over:
            raise ConfigError(
                f"{what} is not supported with a split model: all workers compute each step "
                "together; use --split data"
            )

    def fill(self, work: Work) -> None:
        """Fill the push once all workers have reached theirs.

        A worker without a mini-batch pushes the gradients that those of others left in its part.
        """
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
        self._spread.norms.restart()
        if not self._pushed.num_samples:  # its script has no step, and clears no gradients
            self._replica.drop_gradients()
        self._spread.whole.standing.stands(self._copy.version + 1)
        return fault

    def _present_in_any(self, weights: Sequence[float]) -> Sequence[int]:
        """Return which parameters of this part have gradients in any copy.

        Buffers that scripts have changed in any copy are exchanged with it.
        """
        own_flags, spread = bytes(self._store.present(self._seat)), self._spread
        changed = [spread.changed_buffers >> number & 1 for number in range(len(spread.buffers))]
        flags = torch.tensor([*own_flags, *changed], dtype=torch.uint8)
        if spread.groups.twins is not None:
            spread.groups.twins.all_reduce(flags, is_maximum=True).wait()
        changed = flags[len(own_flags) :].tolist()
        spread.changed_buffers = sum(is_set << number for number, is_set in enumerate(changed))
        present = flags[: len(own_flags)]
        if not self._spread.shared_sizes:
            return present.tolist()
        names = [place.name for place in self._replica.layout.parameters.places]
        number_of = {name: number for number, name in enumerate(names)}
        tied = torch.tensor(
            [
                int(present[number_of[name]]) if name in number_of else 0
                for name, *_ in self._spread.shared_sizes
            ],
            dtype=torch.uint8,
        )
        self._spread.groups.copy.all_reduce(tied, is_maximum=True).wait()
        for (name, *_), is_present in zip(self._spread.shared_sizes, tied.tolist(), strict=True):
            if name in number_of:
                present[number_of[name]] = is_present
        return present.tolist()

    def _unscale(self) -> None:
        """Unscale gradients in a worker without a mini-batch, whose script runs no scaler."""
        scale = self._store.scales.standing(self._copy.version)
        if scale is not None and not self._pushed.num_samples:
            for run in self._runs():
                run.mul_(1.0 / scale.value)

    def _step(self, weights: Sequence[float], present: Sequence[int], clip: Clip) -> None:
        spread = self._spread
        self._unscale()
        copy_weight = sum(weights[seat] for seat in spread.groups.members)
        self._check_shares([weights[seat] for seat in spread.groups.members], copy_weight)
        for number, place in enumerate(self._replica.layout.parameters.places):
            if not self._store.present(self._seat)[number]:
                place.flat(self._mean).zero_()
        runs = self._runs()
        if spread.groups.twins is not None:
            self._reduce_all(runs, copy_weight)
        for name, dtype, numel in spread.shared_sizes:
            total = self._tied.get(name, torch.zeros(0))
            if not total.numel():  # this worker does not hold it
                total = torch.zeros(numel, dtype=dtype)
            with self._told_of_deaths():
                spread.groups.copy.all_reduce(total).wait()
        self._is_bad, squared = self._check_all_parts(runs, clip)
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
            self._reduce_changed(weights[self._seat], copy_weight)
        spread.norms.average([weights[seat] for seat in spread.groups.members])
        if spread.groups.twins is not None:
            self._reduce_buffers(copy_weight)
        elif spread.sums_buffers:
            self._reduce_buffers(weights[self._seat])
        self._share_statistics(spread.norms)
        spread.mark_buffers()
        self._copy.unedited.mark()

    def _reduce_changed(self, weight: float, copy_weight: float) -> None:
        """Average buffers that scripts have changed over all workers, as where nothing is split.

        Args:
            weight: of this worker's push.
            copy_weight: of all pushes of its copy.
        """
        of_part = {id(buffer) for buffer in self._replica.buffers}
        share = weight / copy_weight if copy_weight else 0.0
        for number, buffer in enumerate(self._spread.buffers):
            if not self._spread.changed_buffers >> number & 1:
                continue
            is_counter = not has_mean(buffer.dtype)
            total = buffer.detach().to(torch.int64 if is_counter else carried(buffer.dtype))
            if not is_counter:  # without a weight it may be nan
                total = total * share if share else torch.zeros_like(total)
            total = total.contiguous()
            with self._told_of_deaths():
                self._spread.groups.copy.all_reduce(total, is_maximum=is_counter).wait()
            if self._spread.groups.twins is not None and id(buffer) not in of_part:
                # All twins have it, too; buffers of this part are averaged by _reduce_buffers.
                self._reduce(total, None if is_counter else copy_weight)
            with torch.no_grad():
                buffer.copy_(total)

    def _share_statistics(self, norms: NormStatistics) -> None:
        """Give all workers of the copy the running statistics that one of them has computed.

        Raises:
            ConfigError: scripts have changed them in some workers only.
        """
        if not norms.buffers:
            return
        num_edited, copy = torch.tensor([int(norms.has_edits)]), self._spread.groups.copy
        by_dtype: dict[torch.dtype, list[tuple[Tensor, bool]]] = {}
        for buffer, is_own in norms.buffers:
            by_dtype.setdefault(buffer.dtype, []).append((buffer, is_own))
        with self._told_of_deaths():
            copy.all_reduce(num_edited).wait()
            if 0 < int(num_edited) < copy.size:
                raise ConfigError(
                    "running statistics of batch norm were changed in some workers only: change "
                    "them in all of them, or use --split data"
                )
            for some in by_dtype.values():
                joined = torch.cat([
                    (buffer if is_own else torch.zeros_like(buffer)).view(-1)
                    for buffer, is_own in some
                ])  # fmt: skip
                copy.all_reduce(joined).wait()
                values = torch.split(joined, [buffer.numel() for buffer, _ in some])
                for (buffer, is_own), value in zip(some, values, strict=True):
                    if not is_own:
                        buffer.copy_(value.view(buffer.shape))
        norms.restart()

    def _check_all_parts(self, runs: Sequence[Tensor], clip: Clip) -> tuple[bool, float]:
        """Return whether a gradient of any part is not finite, and the squared norm if needed."""
        counted = [place.flat(self._mean) for place in self._counted]
        is_bad = not self._are_finite(runs)
        wants_norm = clip.has_norm and counted and not is_bad
        squared = norm_of(counted) ** 2 if wants_norm else 0.0
        sums = torch.tensor([float(is_bad), squared], dtype=torch.float64)
        with self._told_of_deaths():
            self._spread.groups.copy.all_reduce(sums).wait()
        return bool(sums[0]), float(sums[1])

    def _bad_name(self) -> str:
        """Return the first parameter, in any part, whose mean is not finite."""
        with self._told_of_deaths():
            names = tell_all(self._spread.groups.copy, super()._bad_name())
        return next((name for name in names if name), "")

    def _stepped(self) -> None:
        if not self._has_stepped:  # the optimizer's state was created, then moved into the block
            self._has_stepped = True
            give_back_freed()
        self._spread.stepped()

    def _check_shares(self, weights: Sequence[float], copy_weight: float) -> None:
        """Raise ConfigError if a gradient had another weight than its push."""
        shares = self._spread.take_shares()
        if shares is None or not copy_weight:
            return
        if any(
            abs(weight / copy_weight - share) > _SAME_SHARE
            for weight, share in zip(weights, shares, strict=True)
        ):
            raise ConfigError(
                "step.weight is not supported with a split model: gradients are weighted by the "
                "samples of each worker's mini-batch as they are computed; use --split data"
            )
