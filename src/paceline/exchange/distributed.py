"""Averaging by ``torch.distributed``, with one accelerator per worker.

    gradient (own device) -- all-reduce: NCCL between GPUs, gloo between CPUs --> mean
    every member steps its own whole copy with the user's optimizer, as PyTorch's DDP does

Where a difference is merged later (own_changes.py), its mean is computed meanwhile (late.py). The
control page still shows who pushed what and keeps the rounds in step, so trace and ledger are those
of peers in shared memory. After a death inside an all-reduce the run ends, or restarts from a
checkpoint. Above 300 lines, since a whole round is here, from its first bucket to the step. This
module must not know protocols.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor

from ..compression.base import UnderWay
from ..errors import AllGone, ConfigError, WorkerError
from ..store.clip import Clip
from ..store.control import ALARM
from ..store.optimizer import Updater
from ..store.sums import are_finite, carried, has_mean, norm_of
from . import Route
from .averaging import Averaging, only_first
from .base import ScriptHooks, Work, advice_not_finite
from .compressed import CompressedGradient, GroupLink, Span
from .group import MemberGroup, start_group
from .late import LateMean
from .model_copy import ModelCopy
from .rounds import Barrier, Line
from .scheduled import along

_TOLD_S = 2.0
"""How long to wait for the launcher's word of a death after a connection broke."""
_DIED_INSIDE = (
    "a worker died inside an all-reduce, and path 'collective' cannot recover from that: use "
    "--respawn to restart from the newest checkpoint, or --path store, which survives any death"
)


class DistributedAveraging(Averaging):
    """Peers whose gradients are averaged by an all-reduce of their group (group.py)."""

    def __init__(self, copy: ModelCopy, barrier: Barrier, hooks: ScriptHooks, route: Route) -> None:
        super().__init__(copy, barrier, hooks, route)
        replica = self._replica
        self._group = self._make_group(route)
        self._own = self._make_own()
        """Parameters and optimizer state in one block on this member's own device."""
        self._updater = Updater(copy.rule, replica.parameters, replica.layout, self._own)
        self._mean = self._zeros(self._own) if copy.is_difference else replica.outgoing
        self._is_bad = False
        self._compressed = hooks.compressed
        if self._compressed is not None:
            self._compressed.cut(self._spans())
        parameters = replica.layout.parameters
        self._late = LateMean(self._group, parameters, self._mean, self._compressed)
        copy.own.before_merge, copy.own.halfway = self._finish_late, self._go_on_late
        if not copy.is_difference:
            copy.unedited.watch(self._own)
            copy.unedited.mark(copy.home)
            copy.move_to(self._own)

    def _make_own(self) -> Tensor:
        """Return this member's copy of the newest version's block in the store."""
        return self._store.blocks[self.block].to(self._replica.device, copy=True)

    def _zeros(self, like: Tensor) -> Tensor:
        """Return memory for a mean."""
        return self._group.zeros(len(like)) if like.device.type == "cpu" else torch.zeros_like(like)

    def _make_group(self, route: Route) -> MemberGroup:
        """Return the group of all members of the run, ranked by seat.

        Raises:
            GivenUp: one of them died before it arrived.
        """
        num_seats, device = self._store.control.num_seats, self._replica.device
        self._barrier.wait()  # torch's rendezvous waits minutes for a member that never comes
        with self._told_of_deaths():
            group = start_group(route.meeting, self._seat, num_seats, device)
        return along(route.collective, group, is_apart=self._copy.own.overlap_steps > 0)

    @property
    def _live(self) -> Tensor:
        return self._own

    @property
    def own_updater(self) -> Updater:
        return self._updater

    def step_aside(self) -> None:
        """Give the store what the next epoch is compared with and what state_dict() reads."""
        self._finish_late()
        self._give_to_store()

    def _give_to_store(self) -> None:
        """Copy parameters and state; the newest version's buffers are in ``kept_buffers``."""
        layout, block = self._replica.layout, self._store.blocks[self.block]
        for section in (layout.parameters, layout.state) if block is not self._own else ():
            section.of(block).copy_(section.of(self._own))

    def pull(self, version: int) -> None:
        """Load the newest version, which is on this device: the store's block is old."""
        self._finish_late()
        self._copy.version = version
        if self._copy.is_difference:
            self._copy.begin_again(self._live, is_whole=True)

    def standing(self) -> tuple[Tensor, Tensor]:
        self._finish_late()
        return super().standing()

    def refuse(self, what: str, *, is_over: bool = False) -> None:
        raise ConfigError(f"{what} is not supported on path 'collective'; use --path store")

    # -- one round ------------------------------------------------------------------------------

    def _fill(self, work: Work) -> None:
        replica, present = self._replica, self._store.present(self._seat)
        replica.held.take_buffers()
        if self._copy.is_difference:
            self._copy.unedited.check()
            present[:] = self._copy.own.due.present
            self._copy.difference_into(self._mean)
            self._copy.own.hand_in()
            return
        if work.inv_scale != 1.0:
            replica.scale_gradients(work.inv_scale)
        replica.gather(present)

    def update(self, lines: Sequence[Line]) -> None:
        self._is_bad = False
        super().update(lines)

    def _step(self, weights: Sequence[float], present: Sequence[int], clip: Clip) -> None:
        """Average all gradients by samples, then step the optimizer on the whole copy."""
        if self._copy.is_lockstep:
            self._adopt(weights)
            return
        weight = weights[self._seat]
        if self._copy.own.merges_later:
            self._reduce_buffers(weight)
            with self._told_of_deaths():
                self._late.begin(self._copy.own.due, weight)
            return
        runs = self._runs()
        if self._compressed is None:
            self._reduce_all(runs, weight)
        else:
            self._reduce_compressed(self._compressed, weight)
        self._is_bad = not self._are_finite(runs)
        if self._is_bad:
            return
        if self._compressed is not None and self._copy.own.are_by_parts:
            self._compressed.keep_fragment(self._copy.own.due)
        elif self._compressed is not None:
            self._compressed.keep(present, self._mean)
            self._drop_what_is_absent(present)
        if clip.has_norm:
            self.norm = norm_of(runs)
        for run in runs:
            if (factor := clip.factor(self.norm)) != 1.0:
                run.mul_(factor)
            if clip.has_value:
                run.clamp_(-clip.max_value, clip.max_value)
        self._hooks.advance_schedule(self._copy.version)
        self._updater.step(self._mean, present, self._copy.rule.param_groups)
        self._drop_means_of_others(present)
        self._reduce_buffers(weight)
        if not self._copy.is_difference:
            self._copy.unedited.mark()

    def _go_on_late(self) -> None:
        with self._told_of_deaths():
            self._late.go_on()

    def _finish_late(self) -> None:
        """Finish a mean in flight: make the outer step and renew the base of differences."""
        with self._told_of_deaths():
            due = self._late.finish()
        if due is None:
            return
        runs = due.runs(self._replica.layout.parameters)
        if not self._are_finite([self._mean[a:b].view(dtype) for dtype, a, b in runs]):
            self._refuse_not_finite()
        if self._compressed is not None:
            self._compressed.keep_fragment(due)
        self._updater.step(self._mean, due.present, self._copy.rule.param_groups)
        assert self._copy.base is not None
        self._copy.base[due.start : due.stop].copy_(self._own[due.start : due.stop])

    def _are_finite(self, runs: Sequence[Tensor]) -> bool:
        """Return whether the mean is finite; a sum reads it once, but may itself overflow."""
        return are_finite([run.sum() for run in runs]) or math.isfinite(norm_of(runs))

    def _runs(self) -> list[Tensor]:
        """Return the mean of what is due, one run per dtype."""
        return [
            self._mean[start:stop].view(dtype)
            for dtype, start, stop in self._copy.own.due.runs(self._replica.layout.parameters)
        ]

    def _spans(self) -> list[Span]:
        """Return the spans that are compressed together."""
        parameters = self._replica.layout.parameters
        parts = self._copy.own.fragments.each
        return [Span(a, b, dtype) for part in parts for dtype, a, b in part.runs(parameters)]

    def _reduce_compressed(self, compressed: CompressedGradient, weight: float) -> None:
        """Compute the mean of the compressed gradients of all members."""
        under_way = UnderWay(GroupLink(self._group))
        with self._told_of_deaths():
            due = self._copy.own.due
            for exchanging in compressed.begin_all(self._mean, weight, self._mean, due):
                under_way.begin(exchanging)
            under_way.finish()

    def _drop_what_is_absent(self, present: Sequence[int]) -> None:
        """Zero the mean of parameters that nobody has a gradient for.

        Nobody else overwrites the place of a frozen one, so it would be added to the next mean.
        """
        places = self._replica.layout.parameters.places
        for place, is_there in zip(places, present, strict=True):
            if not is_there:
                place.flat(self._mean).zero_()

    def _drop_means_of_others(self, present: Sequence[int]) -> None:
        """Zero the mean of parameters for which only others have a gradient: where gradients are
        summed in place, it would be added to the next mean as this member's own."""
        own = self._store.present(self._seat)
        places = self._replica.layout.parameters.places
        if self._copy.is_difference or bytes(own) == bytes(present):
            return
        for place, is_there, is_own in zip(places, present, own, strict=True):
            if is_there and not is_own:
                place.flat(self._mean).zero_()

    def _reduce_all(self, runs: Sequence[Tensor], weight: float) -> None:
        for run in runs:
            self._reduce(run, weight)

    def _reduce_buffers(self, weight: float) -> None:
        """Average the buffers, one dtype at a time, in a dtype that keeps equal values equal."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._replica.buffers:
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for dtype, buffers in by_dtype.items():
            joined = torch.cat([buffer.reshape(-1) for buffer in buffers]).to(carried(dtype))
            self._reduce(joined, weight if has_mean(dtype) else None)
            parts = torch.split(joined, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

    def _adopt(self, weights: Sequence[float]) -> None:
        """Take the parameters of the first who pushed: all made the same step by themselves."""
        runs, size = self._runs(), self._replica.layout.parameters.stop
        self._reduce_all(runs, only_first(weights)[self._seat])
        self._is_bad = not all(bool(torch.isfinite(run).all()) for run in runs)
        if not self._is_bad:
            self._own[:size].copy_(self._mean[:size])
            self._reduce_buffers(weights[self._seat])

    @property
    def _gradient_slot(self) -> Tensor:
        return self._mean

    def _mean_of_gradients(self, weights: Sequence[float]) -> Tensor:
        self._reduce_all(self._runs(), weights[self._seat])
        return self._mean

    def _reduce(self, tensor: Tensor, weight: float | None) -> None:
        """Sum by weights, or take the maximum, over all members and in place.

        Raises:
            AllGone: one of them died meanwhile.
        """
        if weight is not None:
            tensor.mul_(weight) if weight else tensor.zero_()
        with self._told_of_deaths():
            self._group.all_reduce(tensor, is_maximum=weight is None, at_once=True).wait()

    @contextmanager
    def _told_of_deaths(self) -> Iterator[None]:
        """Turn a broken connection into AllGone if a member died, else into WorkerError."""
        try:
            yield
        except RuntimeError as error:
            end_s = time.monotonic() + _TOLD_S
            while time.monotonic() < end_s:
                if self._store.control[ALARM]:
                    raise AllGone(_DIED_INSIDE) from None
                time.sleep(0.01)
            raise WorkerError(
                f"worker {self._seat}: an all-reduce failed, and no worker is known to have died: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _undo_if_bad(self) -> bool:
        """Return whether the mean was not finite; all members saw it and changed nothing."""
        if self._is_bad and not self._copy.skips_not_finite:
            self._refuse_not_finite()
        if self._is_bad:  # also between parameters, where nobody else overwrites it
            self._mean[: self._replica.layout.parameters.stop].zero_()
        return self._is_bad

    def _bad_name(self) -> str:
        """Return the first parameter whose mean is not finite; empty: all are finite."""
        for place in self._replica.layout.parameters.places:
            if not bool(torch.isfinite(place.flat(self._mean)).all()):
                return place.name
        return ""

    def _refuse_not_finite(self) -> NoReturn:
        can_skip = not self._copy.own.overlap_steps  # run/describe.py refuses both together
        raise WorkerError(
            f"worker {self._seat}: the averaged gradient of {self._bad_name() or '?'!r} is not "
            f"finite at version {self._copy.version}; {advice_not_finite(can_skip=can_skip)}"
        )

    # -- the way out ----------------------------------------------------------------------------

    def give_up(self, work: Work, *, is_updating: bool) -> None:
        if is_updating:
            raise AllGone(_DIED_INSIDE)
        if work.num_samples:
            if self._copy.is_difference:
                self._copy.fill(work, self._copy.version)
            else:
                self._replica.send()
        super().give_up(work, is_updating=is_updating)

    def hand_over(self) -> None:
        """Give the store this member's copy; all copies are equal."""
        self._finish_late()
        if self._compressed is not None:
            self._compressed.part()
        self._give_to_store()
