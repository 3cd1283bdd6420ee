"""What ``prepare`` makes of a script's objects: the batch of a lease, the step that pushes.

The optimizer, the model and the schedulers stay the user's objects; ``step`` of the optimizer is
replaced on the object. This module must not know how a session carries anything.
"""

import cmath
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from .compute.amp import Amp
from .compute.cancel import grain, watch_forward
from .compute.candidate import Forward
from .compute.replica import Replica, refuse_what_cannot_be_carried
from .compute.schedule import Schedule
from .compute.settings import adopt, settings_text
from .conditions.faults import FaultPlan
from .conditions.holdup import Holdup
from .conditions.mishaps import Mishaps
from .context import Context
from .data.loader import LeasedLoader
from .data.trees import apply
from .errors import ConfigError
from .events import Lease
from .fast import Script, Settled, settle
from .keeper import Keeper, groups_of, random_states, restore_random_states, set_groups
from .replaced import clone_state, note_losses, replace_step, share_state, sort_out
from .scaling import Scaling
from .sessions.base import Session, Shape, Work, not_finite
from .sessions.mediated import MediatedSession
from .sessions.solo import SoloSession
from .store.shared import arena_bytes, pinned_at


class Prepared:
    """The objects of one script, taking part in a run.

    Args:
        objects: what was given to ``prepare``.
        batch: what the loader's batch size means.
        fast: ``auto`` or ``none``, and the loop's own (model, batch) -> loss where it is known.
    """

    def __init__(
        self,
        session: Session,
        context: Context,
        objects: tuple[Any, ...],
        device: torch.device,
        batch: str,
        keeper: Keeper,
        fast: tuple[str, Forward | None] = ("none", None),
    ) -> None:
        self._session = session
        self._context = context
        self._device = device
        self._keeper = keeper
        model, optimizer, loader = sort_out(objects)
        refuse_what_cannot_be_carried(model, optimizer)
        self.model: nn.Module = model
        self.optimizer: Optimizer = optimizer
        counted = LeasedLoader(loader, context.seed, device)
        num_samples, self.num_batches = counted.order.count()
        size = loader.batch_size or -(-num_samples // self.num_batches)
        if batch == "per-worker":
            size *= context.parts
        self.shape = Shape(
            num_samples=num_samples,
            batch_size=size,
            parts=context.parts,
            keep_remainder=not loader.drop_last or counted.order.has_own_batches,
        )
        self.settled = self._settle(loader, *fast)
        speed = self.settled.speed
        self.leased = LeasedLoader(loader, context.seed, device, speed)
        is_chosen = context.precision is not None
        self.amp = Amp(optimizer, device, speed.precision if is_chosen else None)
        self.is_iterating = False
        self.loss: Tensor | None = None
        self._work = Work()
        self._norm: Tensor | None = None
        self.scaling = Scaling(session, model, optimizer, is_local=context.is_difference)
        self._parameters = list(model.parameters())
        self._local_steps = 0
        self._holdup = Holdup.of(context, session.seat)
        plan = FaultPlan.parse(context.fault, context.workers)
        self._mishaps = Mishaps(plan.of_worker(session.seat))
        self._begun_s = time.perf_counter()
        self._step_optimizer = optimizer.step
        replace_step(optimizer, self._step)
        self._schedules = [
            Schedule(
                one,
                is_iterating=lambda: self.is_iterating,
                version=lambda: session.applied(session.version),
                per_version=session.schedule_by_version,
            )
            for one in objects
            if isinstance(one, LRScheduler | ReduceLROnPlateau)
        ]

    def _settle(self, loader: DataLoader[Any], fast: str, forward: Forward | None) -> Settled:
        """How this worker computes: chosen by hand, by measuring, or as it is."""
        context, size = self._context, self.shape.batch_size
        script = Script(
            model=self.model,
            optimizer=self.optimizer,
            loader=loader,
            device=self._device,
            sizes=frozenset({max(1, size // context.parts), -(-size // context.parts)}),
            num_workers=self._session.num_workers,
            steps_itself=context.is_difference or not isinstance(self._session, MediatedSession),
            forward=forward,
        )
        return settle(script, context, fast)

    def attach(self, session: MediatedSession) -> None:
        """Join a run of several workers: move the model's memory, replace what must be shared."""
        rule = self.optimizer
        if self._context.is_difference:
            trainable = [one for one in self.model.parameters() if one.requires_grad]
            rule = torch.optim.SGD(trainable, lr=1.0)
        self._keeper.load(self.model, self.optimizer, is_difference=self._context.is_difference)
        self._remember()
        replica = Replica(self.model, self.optimizer, rule)
        if self._context.cancels:
            watch_forward(self.model, session.check)
        if self._schedules:
            session.advance_schedule = self.advance
        session.adopt = lambda text: adopt(text, self.optimizer, self._schedules)
        at = pinned_at(replica.layout, session.num_workers)
        session.snapshots.write_own = self._keeper.write
        session.snapshots.write_layout = lambda number: self._keeper.write_layout(
            number, replica.layout, at
        )
        session.attach(replica, rule, self.shape, self._describe(replica))
        clone_state(self.model)
        note_losses(self.note_loss)
        if not self._context.is_difference:
            share_state(self.optimizer, session.optimizer_state)

    def _remember(self) -> None:
        """What a checkpoint has of this member, beside model and optimizer state."""
        add, optimizer = self._keeper.add, self.optimizer
        if self._context.is_difference:
            add("optimizer", optimizer.state_dict, optimizer.load_state_dict)
        add("groups", lambda: groups_of(optimizer), lambda rows: set_groups(optimizer, rows))
        for number, schedule in enumerate(self._schedules):
            add(f"schedule {number}", schedule.remember, schedule.go_on)
        add("scale", self.scaling.remember, self.scaling.go_on)
        if isinstance(self._session, MediatedSession):
            add("skipped", self._session.num_skipped, self._session.begin_skipped)
        add("order", self.leased.order.digest, self.leased.order.expect)
        rng = self._holdup.rng
        add("delays", rng.getstate, rng.setstate)
        add("random", random_states, restore_random_states)

    def _describe(self, replica: Replica) -> dict[str, object]:
        layout, context = replica.layout, self._context
        rates = [float(group.get("lr", math.nan)) for group in self.optimizer.param_groups]
        return {
            "digest": f"{layout.digest()}-{self.shape}",
            "task": context.name,
            "source": context.source,
            "program": context.program,
            "threads": torch.get_num_threads(),
            "device": str(self._device),
            "num_parameters": layout.num_parameters,
            "update_bytes": layout.parameters.num_bytes,
            "arena_bytes": arena_bytes(layout, self._session.num_workers, pins=context.checkpoints),
            "pinned_bytes": layout.block_bytes if context.checkpoints else 0,
            "num_samples": self.shape.num_samples,
            "batch_size": self.shape.batch_size,
            "drop_last": not self.shape.keep_remainder,
            "has_own_batches": self.leased.order.has_own_batches,
            "order": self.leased.order.kind,
            "lookahead": self.leased.lookahead,
            "learning_rates": rates,
            "epochs": context.epochs or 0,
            "grain": grain(self.model) if context.cancels else "none needed",
            "can_share": self._device.type == "cpu" or context.path == "collective",
            "notes": [*context.notes, *self.settled.notes],
            "could_try": list(self.settled.could_try),
            "rounding": list(self.settled.rounding),
        }

    def advance(self, version: int) -> bool:
        """Bring the schedulers to this version, skipped updates not counted; whether any are."""
        for schedule in self._schedules:
            schedule.advance(self._session.applied(version))
        return bool(self._schedules)

    @property
    def tells_settings(self) -> bool:
        """Whether a worker that comes later will want them."""
        return self._context.respawn and isinstance(self._session, MediatedSession)

    def tell_settings(self) -> None:
        """What learning rates and schedules are, for a worker that comes later."""
        assert isinstance(self._session, MediatedSession)
        self._session.tell_settings(settings_text(self.optimizer, self._schedules))

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
            scale = self.amp.unscale()
            self.loss = None if self.loss is None else self.loss / scale
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        self._work.max_norm = max_norm
        self._norm = torch.tensor(math.nan)
        return self._norm

    def skip(self) -> None:
        self.replica_drop()
        self._session.give_back()
        self.scaling.follow()

    def replica_drop(self) -> None:
        """Forget the gradients of work that does not count."""
        self._work = Work()
        self.loss = None
        self.amp.is_waiting = False
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
        if (grant := self._session.grant()) is None:
            raise ConfigError(
                "optimizer.step() was called outside the prepared loader: there is no mini-batch "
                "that the update could stand for"
            )
        if self.amp.is_waiting:
            self.amp.step()  # it comes back here with what the scaler found
            return
        self.amp.check()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.leased.fetch_ahead()  # the device is still at work on this batch
        self._hold_up(grant.ticket.serial)
        work, self._work = self._work, Work()
        work.loss = float(self.loss) if self.loss is not None else math.nan
        self.loss = None
        self.scaling.read(work)
        if not isinstance(self._session, MediatedSession):
            self._step_alone(work)
        elif not self._context.is_difference:
            self._session.push(work)
        else:
            self._step_locally(work)
        if self._norm is not None:
            self._norm.fill_(self._session.last_norm)
            self._norm = None

    def _hold_up(self, serial: int) -> None:
        """What ``--delay``, ``--slow`` and ``--fault`` ask for, between gradient and push."""
        session, mishaps = self._session, self._mishaps
        now_s = time.perf_counter()
        self._holdup.catch_up(serial)
        hold_s = self._holdup.seconds(self._begun_s, now_s)
        if mishaps:
            for fault in mishaps.due(session.version, session.trained_s):
                session.befall(fault)
            factor = mishaps.factor(session.trained_s)
            hold_s = (now_s - self._begun_s + hold_s) * factor - (now_s - self._begun_s)
        if hold_s > 0.0:
            session.sleep(hold_s)

    def _step_alone(self, work: Work) -> None:
        assert isinstance(self._session, SoloSession)
        if work.found_inf or not self._is_finite(work):
            self._session.skip(work)
            return
        self.advance(self._session.version)
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
        """Whether the update can be made: no gradient holds inf or nan, which sums spread."""
        sums = [p.grad.sum() for p in self.model.parameters() if p.grad is not None]
        if self._device.type != "cpu":  # each number that is read waits for the device
            sums = [torch.stack([one.abs().float() for one in sums]).sum()] if sums else []
        if all(cmath.isfinite(one.item()) for one in sums):
            return True
        for name, parameter in self.model.named_parameters():  # or a sum was too large
            if parameter.grad is None or bool(torch.isfinite(parameter.grad).all()):
                continue
            if self._context.nonfinite == "skip":
                return False
            version = self._session.version
            loss = None if math.isnan(work.loss) else work.loss
            raise not_finite(self._session.seat, name, version, version, loss)
        return True
