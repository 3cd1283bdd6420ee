"""What ``prepare`` makes of a script's objects: the loader that leases, the step that pushes.

The optimizer, the model and the schedulers stay the user's objects; ``step`` of the optimizer is
replaced on the object. This module must not know how a session carries anything.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .compute.cancel import grain, watch_forward
from .compute.replica import Replica, refuse_what_cannot_be_carried
from .compute.scalers import follow, only_scaler, read_scaler, scaler_at, share_scaler
from .compute.schedule import Schedule
from .conditions.delays import parse_delays, parse_slow
from .context import Context
from .data.loader import LeasedLoader, apply
from .errors import ConfigError
from .events import Grant, Lease
from .replaced import clone_state, note_losses, replace_step, share_state, sort_out
from .sessions.base import Session, Shape, Work, not_finite
from .sessions.mediated import MediatedSession
from .store.shared import arena_bytes


class Prepared:
    """The objects of one script, taking part in a run.

    Args:
        objects: what was given to ``prepare``.
        batch: what the loader's batch size means.
    """

    def __init__(
        self,
        session: Session,
        context: Context,
        objects: tuple[Any, ...],
        device: torch.device,
        batch: str,
    ) -> None:
        self._session = session
        self._context = context
        self._device = device
        model, optimizer, loader = sort_out(objects)
        refuse_what_cannot_be_carried(model, optimizer)
        self.model: nn.Module = model
        self.optimizer: Optimizer = optimizer
        self.leased = LeasedLoader(loader, context.seed, device)
        num_samples, self.num_batches = self.leased.count()
        size = loader.batch_size or -(-num_samples // self.num_batches)
        if batch == "per-worker":
            size *= context.parts
        self.shape = Shape(
            num_samples=num_samples,
            batch_size=size,
            parts=context.parts,
            keep_remainder=not loader.drop_last or self.leased.has_own_batches,
        )
        self.is_iterating = False
        self.loss: Tensor | None = None
        self._work = Work()
        self._norm: Tensor | None = None
        self._scaler: GradScaler | None = None
        self._parameters = list(model.parameters())
        self._local_steps = 0
        self._delay = parse_delays(context.delay, context.workers)[session.seat]
        self._slow = parse_slow(context.slow, context.workers).get(session.seat, 1.0)
        self._rng = random.Random(f"{context.seed}/{session.seat}")
        self._begun_s = time.perf_counter()
        self._step_optimizer = optimizer.step
        replace_step(optimizer, self._step)
        self._schedules = [
            Schedule(
                one,
                is_iterating=lambda: self.is_iterating,
                version=lambda: session.version,
                per_version=session.schedule_by_version,
            )
            for one in objects
            if isinstance(one, LRScheduler | ReduceLROnPlateau)
        ]

    def attach(self, session: MediatedSession) -> None:
        """Join a run of several workers: move the model's memory, replace what must be shared."""
        rule = self.optimizer
        if self._context.is_difference:
            trainable = [one for one in self.model.parameters() if one.requires_grad]
            rule = torch.optim.SGD(trainable, lr=1.0)
        replica = Replica(self.model, self.optimizer, rule)
        if self._context.cancels:
            watch_forward(self.model, session.check)
        if self._schedules:
            session.advance_schedule = self.advance
        session.attach(replica, rule, self.shape, self._describe(replica))
        clone_state(self.model)
        note_losses(self.note_loss)
        if not self._context.is_difference:
            share_state(self.optimizer, session.optimizer_state)

    def _describe(self, replica: Replica) -> dict[str, object]:
        layout, context = replica.layout, self._context
        rates = [float(group.get("lr", math.nan)) for group in self.optimizer.param_groups]
        return {
            "digest": f"{layout.digest()}-{self.shape}",
            "task": context.name,
            "source": context.source,
            "device": str(self._device),
            "num_parameters": layout.num_parameters,
            "update_bytes": layout.parameters.num_bytes,
            "arena_bytes": arena_bytes(layout, self._session.num_workers),
            "num_samples": self.shape.num_samples,
            "batch_size": self.shape.batch_size,
            "drop_last": not self.shape.keep_remainder,
            "has_own_batches": self.leased.has_own_batches,
            "lookahead": self.leased.lookahead,
            "learning_rates": rates,
            "epochs": context.epochs or 0,
            "grain": grain(self.model) if context.cancels else "none needed",
            "can_share": self._device.type == "cpu" or context.path == "collective",
            "notes": list(context.notes),
        }

    def advance(self, version: int) -> bool:
        """Bring the schedulers to this version; whether there are any."""
        for schedule in self._schedules:
            schedule.advance(version)
        return bool(self._schedules)

    def note_loss(self, loss: Tensor) -> None:
        """The loss that the next push reports."""
        self.loss = loss

    # -- one mini-batch -------------------------------------------------------------------------

    def take(self, lease: Lease) -> Any:
        """The batch of ``lease``; the step on it begins."""
        self._work.num_samples += lease.num_samples
        return self.leased.fetch(lease)

    def to_device(self, batch: Any) -> Any:
        if self._device.type == "cpu":
            return batch
        return apply(lambda tensor: tensor.to(self._device), batch)

    def begin_step(self) -> None:
        self._begun_s = time.perf_counter()

    def clip(self, parameters: Any, max_norm: float) -> Tensor:
        """See ``Pace.clip_grad_norm_``."""
        if self._session.num_workers == 1 and not isinstance(self._session, MediatedSession):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        self._work.max_norm = max_norm
        self._norm = torch.tensor(math.nan)
        return self._norm

    def skip(self) -> None:
        self.replica_drop()
        self._session.give_back()
        self.follow_scale()

    def replica_drop(self) -> None:
        """Forget the gradients of work that does not count."""
        self._work = Work()
        self.loss = None
        for parameter in self._parameters:
            parameter.grad = None

    def push_rest(self) -> None:
        """At an epoch's end: what was accumulated and not stepped yet makes a last push."""
        if self._work.num_samples:
            self._step()

    def _step(self, closure: Callable[[], float] | None = None) -> None:
        """Replaces ``optimizer.step``: push, wait for the release, pull."""
        if closure is not None:
            raise ConfigError("optimizer.step(closure) calls the model again; step without one")
        if self._session.grant() is None:
            raise ConfigError(
                "optimizer.step() was called outside the prepared loader: there is no mini-batch "
                "that the update could stand for"
            )
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._hold_up()
        work, self._work = self._work, Work()
        work.loss = float(self.loss) if self.loss is not None else math.nan
        self.loss = None
        self._read_scaler(work)
        if not isinstance(self._session, MediatedSession):
            self._step_alone(work)
        elif not self._context.is_difference:
            self._session.push(work)
        else:
            self._step_locally(work)
        if self._norm is not None:
            self._norm.fill_(self._session.last_norm)
            self._norm = None

    def _step_alone(self, work: Work) -> None:
        if work.found_inf or not self._is_finite(work):
            self._session.push(work)
            return
        for schedule in self._schedules:
            schedule.advance(self._session.version)
        self._step_optimizer()
        self._session.push(work)

    def _step_locally(self, work: Work) -> None:
        """local-sgd: the user's optimizer steps here; after the last lease the difference goes."""
        if not work.found_inf:
            self._step_optimizer()
        grant = self._session.grant()
        assert grant is not None
        self._local_steps += 1
        if self._local_steps < len(grant.leases):
            self._work.num_samples = work.num_samples
            return
        self._local_steps = 0
        work.inv_scale, work.found_inf = 1.0, False
        self._session.push(work)

    def _is_finite(self, work: Work) -> bool:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if all(math.isfinite(float(one)) for one in torch._foreach_norm(grads)):
            return True
        if self._context.nonfinite == "skip":
            return False
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                version = self._session.version
                loss = None if math.isnan(work.loss) else work.loss
                raise not_finite(self._session.seat, name, version, version, loss)
        return True

    def _read_scaler(self, work: Work) -> None:
        """What a GradScaler left on the optimizer: the scale, and whether it found inf."""
        found = getattr(self.optimizer, "found_inf", None)
        scale = getattr(self.optimizer, "grad_scale", None)
        if found is not None:
            work.found_inf = bool(found)
            self._share_scaler()
        if scale is not None:
            work.inv_scale = 1.0 / float(scale)
            work.loss *= work.inv_scale
        if self._context.is_difference or not isinstance(self._session, MediatedSession):
            self._unscale(work.inv_scale)

    def _unscale(self, inv_scale: float) -> None:
        """For a step here: torch's own optimizers would refuse what the scaler left on them."""
        for name in ("grad_scale", "found_inf"):
            if name in self.optimizer.__dict__:
                setattr(self.optimizer, name, None)
        if inv_scale != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(inv_scale)

    def _share_scaler(self) -> None:
        """The scaler that steps now follows the run's scale; local-sgd's workers scale for
        themselves, as they step for themselves."""
        session = self._session
        if session.num_workers == 1 or self._context.is_difference:
            return
        assert isinstance(session, MediatedSession)
        scaler = scaler_at(self.optimizer)
        if scaler is not None and scaler is not self._scaler:
            session.offer_scale(read_scaler(scaler))
            self._adopt(scaler)

    def _adopt(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        share_scaler(scaler, lambda: self._session.scale)

    def follow_scale(self) -> None:
        """After a step that was left: the scale of the version that was pulled instead."""
        scale = self._session.scale
        if scale is None:
            return
        if self._scaler is None and (scaler := only_scaler()) is not None:
            self._adopt(scaler)
        if self._scaler is not None:
            follow(self._scaler, scale)

    def _hold_up(self) -> None:
        """The delay that ``--delay`` and ``--slow`` ask for; left when the work is superseded."""
        hold_s = 0.0
        if self._slow > 1.0:
            hold_s += (self._slow - 1.0) * (time.perf_counter() - self._begun_s)
        if self._delay is not None:
            hold_s += self._delay.sample(self._rng) * self._slow
        if hold_s > 0.0:
            self._session.sleep(hold_s)


class PreparedLoader:
    """Iterates over the mini-batches that this worker is granted, epoch by epoch.

    ``len`` is the number of updates an epoch.
    """

    def __init__(self, prepared: Prepared, take_epoch: Callable[[], int]) -> None:
        self._prepared = prepared
        self._take_epoch = take_epoch
        self.dataset = prepared.leased.dataset
        self.batch_size = prepared.shape.batch_size

    def __len__(self) -> int:
        prepared = self._prepared
        if prepared.leased.has_own_batches:
            return prepared.num_batches
        return prepared.shape.batches().num_batches

    def __iter__(self) -> Iterator[Any]:
        prepared = self._prepared
        session = prepared._session
        epoch = self._take_epoch()
        leased = prepared.leased
        if not session.open_epoch(epoch, leased.draw(epoch)):
            return
        prepared.is_iterating = True
        try:
            while (grant := session.grant()) is not None:
                yield from self._granted(grant)
            prepared.advance(session.version)  # so that every worker shows the same rate now
        finally:
            prepared.is_iterating = False
            leased.end_epoch()

    def _granted(self, grant: Grant) -> Iterator[Any]:
        """The batches of one grant, and more of them while the loop accumulates."""
        prepared, session = self._prepared, self._prepared._session
        leases, depth = grant.leases, prepared.leased.lookahead
        while True:
            if depth:
                prepared.leased.reserve(session.upcoming(depth))
            for lease in leases:
                yield prepared.take(lease)
                if session.grant() is not grant:
                    return
            more = session.extend()
            if more is None:
                prepared.push_rest()
                return
            leases = (more,)
