"""An exchange between peers whose bytes ``torch.distributed`` carries: one accelerator a worker.

    gradient (own device) -- all-reduce: NCCL between GPUs, gloo between CPUs --> mean
    every member steps its own whole copy with the user's optimizer, as PyTorch's DDP does

The control page still tells who pushed what and keeps the rounds in step, so trace and ledger are
those of peers in shared memory. A death inside an all-reduce cannot be mended here: the run ends,
or begins again from a checkpoint. This module must not know protocols.
"""

import datetime
import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import AllGone, ConfigError, WorkerError
from ..events import Lease
from ..store.control import ALARM
from ..store.optimizer import Updater
from ..wire.messages import NOT_FINITE, OK, Entry
from .base import Work
from .peers import PeerExchange
from .rounds import Line, check_settings, common_clip

_TIMEOUT = datetime.timedelta(minutes=5)
_TOLD_S = 2.0
"""Within which the launcher tells of a death that a broken connection has told of already."""
_DIED_INSIDE = (
    "a worker died inside an all-reduce, which cannot be mended on path 'collective': --respawn "
    "goes on from the newest checkpoint, --path store mends every death"
)


class DistributedExchange(PeerExchange):
    """A member whose gradients are averaged by an all-reduce."""

    rendezvous = ""
    """A file of this run through which the members find each other; set at spec."""
    _is_bad = False

    def _enter(self) -> None:
        """Parameters and optimizer state in one block on this member's own device."""
        self._is_express = True
        store, replica = self.store, self._copy.replica
        self._start_group()
        self._block = store.current
        self._own = store.blocks[self._block].to(replica.device, copy=True)
        self._kept_buffers = replica.layout.buffers.of(self._copy.home).clone()
        self._updater = Updater(self._copy.rule, replica.parameters, replica.layout, self._own)
        self._mean = torch.zeros_like(self._own) if self._copy.is_difference else replica.outgoing
        self._all_present = b"\1" * len(replica.parameters)
        if not self._copy.is_difference:
            replica.live_in(self._own)
            self.unedited.watch(self._own)
            self.unedited.mark(self._copy.home)

    def _come_back(self) -> None:
        """The weights lie alone already."""

    def _step_aside(self) -> None:
        """The store gets what the next epoch is compared with, and what state_dict() reads."""
        if self._is_express:
            layout, block = self._copy.replica.layout, self.store.blocks[self._block]
            for section in (layout.parameters, layout.state):
                section.of(block).copy_(section.of(self._own))

    def _start_group(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if self._copy.replica.device.type == "cpu" else None,
                init_method=f"file://{self.rendezvous}",
                rank=self.seat,
                world_size=self.num_workers,
                timeout=_TIMEOUT,
            )

    def extend(self) -> Lease | None:
        if self._is_express:
            raise ConfigError(
                "gradient accumulation is not carried by path 'collective'; use --path store"
            )
        return super().extend()

    def give_back(self) -> None:
        if self._is_express:
            raise ConfigError("step.skip() is not carried by path 'collective'; use --path store")
        super().give_back()

    def push(self, work: Work) -> None:
        if self._is_express and (work.kept or work.unused or not work.weight):
            raise ConfigError(
                "a mini-batch without a step of its own (skipped, accumulated, or stepped twice) "
                "is not carried by path 'collective'; use --path store"
            )
        super().push(work)

    def leave_epoch(self, kept: Sequence[int], *, is_look: bool = False) -> None:
        if self._is_express:
            raise ConfigError(
                "leaving the loop early is not carried by path 'collective'; use --path store"
            )
        super().leave_epoch(kept, is_look=is_look)

    # -- one round ------------------------------------------------------------------------------

    def _fill(self, work: Work) -> None:
        replica = self._copy.replica
        if self._copy.is_difference:
            self.unedited.check()
            self.store.present(self.seat)[:] = self._all_present
            self._copy.difference_into(self._mean)
            return
        if work.inv_scale != 1.0:
            replica.scale_gradients(work.inv_scale)
        replica.held.take_buffers()
        replica.gather(self.store.present(self.seat))

    def _update(self, lines: list[Line]) -> None:
        """The mean of all gradients by samples, then the optimizer's step on the whole copy."""
        weights = [line.weight for line in lines]
        check_settings(lines)
        clip = common_clip(lines)
        if not self._copy.is_difference:
            self.unedited.check()
        self._is_bad = False
        self._is_skipped = any(line.fault for line in lines)
        if self._is_skipped:
            return
        weight = weights[self.seat] / sum(weights)
        runs = [
            self._mean[start:stop].view(dtype)
            for dtype, start, stop in self._copy.replica.layout.parameters.runs()
        ]
        for run in runs:
            run.mul_(weight) if weight else run.zero_()
            self._reduce(run)
        norm = math.sqrt(math.fsum(float(run.square().sum()) for run in runs))
        self._is_bad = not math.isfinite(norm)
        if self._is_bad:
            return
        if clip.has_norm:
            self._round_norm = norm
        for run in runs:
            if (factor := clip.factor(norm)) != 1.0:
                run.mul_(factor)
            if clip.has_value:
                run.clamp_(-clip.max_value, clip.max_value)
        self.advance_schedule(self._copy.version)
        self._updater.step(self._mean, self._present_in_any(weights), self._copy.rule.param_groups)
        self._average_buffers(weight)
        if not self._copy.is_difference:
            self.unedited.mark()

    def _average_buffers(self, weight: float) -> None:
        for buffer in self._copy.replica.buffers:
            if buffer.is_floating_point():
                buffer.mul_(weight) if weight else buffer.zero_()
                self._reduce(buffer)
            else:
                self._reduce(buffer, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, how: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM) -> None:
        """In place, over all members. AllGone: one of them died meanwhile."""
        try:
            dist.all_reduce(tensor, how)
        except RuntimeError:
            end_s = time.monotonic() + _TOLD_S
            while time.monotonic() < end_s:
                if self._control[ALARM]:
                    raise AllGone(_DIED_INSIDE) from None
                time.sleep(0.01)
            raise

    def _take_back_if_bad(self) -> int:
        """All members saw the same mean and left everything as it was."""
        if self._is_bad and not self._copy.skips_not_finite:
            raise WorkerError(
                f"worker {self.seat}: the averaged gradient of {self._name_of_bad()!r} is not "
                f"finite at version {self.version}; lower the learning rate, clip the gradient, or "
                "go on without such updates: --nonfinite skip"
            )
        mine = self._copy.replica.layout.buffers.of(self._copy.home)
        if self._is_bad or self._is_skipped:
            mine.copy_(self._kept_buffers)
        else:
            self._kept_buffers.copy_(mine)
        return NOT_FINITE if self._is_bad else OK

    def _name_of_bad(self) -> str:
        for place in self._copy.replica.layout.parameters.places:
            if not bool(torch.isfinite(place.flat(self._mean)).all()):
                return place.name
        return "?"

    def _pull(self, version: int) -> None:
        """While peers run, the store's block is old: what is newest lies on this device."""
        if not self._is_express:
            super()._pull(version)
            return
        self._copy.version = version
        if self._copy.is_difference:
            self._pull_share()

    def _pull_share(self) -> None:
        size = self._copy.replica.layout.parameters.stop
        self._copy.home[:size].copy_(self._own[:size])
        assert self._copy.base is not None
        self._copy.base.copy_(self._copy.home)
        self.unedited.mark()

    def _standing(self) -> tuple[Tensor, Tensor | None]:
        return (self._own, self._kept_buffers) if self._is_express else super()._standing()

    # -- the way out ----------------------------------------------------------------------------

    def _interrupted(self, phase: int, work: Work) -> None:
        if phase == 2:
            raise AllGone(_DIED_INSIDE)
        if work.num_samples:
            if self._copy.is_difference:
                self._copy.fill(work, self._step)
            else:
                self._copy.replica.send()
        super()._interrupted(phase, work)

    def _restore_the_dead(self) -> None:
        return None

    def _leave(self) -> None:
        self._write_back()
        super()._leave()

    def _report_interruption(
        self, mine: Entry | None, entries: tuple[Entry, ...], *, needs_store: bool = False
    ) -> None:
        self._write_back()
        super()._report_interruption(mine, entries, needs_store=needs_store)

    def _write_back(self) -> None:
        """Hand the whole state to the store; every member's copy is the same."""
        self.store.blocks[self._block].copy_(self._own)
