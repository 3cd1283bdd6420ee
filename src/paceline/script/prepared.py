"""What ``prepare`` makes of a script's objects: the batch of a lease, the step that pushes.

The optimizer, the model and the schedulers stay the user's objects; ``step`` of the optimizer is
replaced on the object. This module must not know how a session carries anything.
"""

import cmath
import math
import re
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..conditions.faults import FaultPlan, WorkerFaults
from ..conditions.slowness import InjectedDelay
from ..context import Context
from ..data.feed import SeededData, apply, plain_batches, plain_sizes
from ..data.likeness import sample_digests
from ..data.loader import LeasedLoader
from ..errors import ConfigError, WorkerError
from ..events import Grant, Lease
from ..exchange.base import Exchange, Shape, Stopped, Superseded, Work, not_finite
from ..exchange.through_store import StoreExchange
from ..replica.batch_norm import batch_norm_note
from ..replica.cancel import grain, watch_forward
from ..replica.replica import Replica, refuse_hooks, refuse_what_cannot_be_carried
from ..store.control import MOST_SCHEDULES
from ..store.parameter_store import arena_bytes, pinned_at
from ..tuning.candidate import Forward
from ..tuning.fast import Script, Settled, settle
from .amp import Amp, Scaling
from .clipping import Clipping
from .edits import Edits
from .grad_scaler import reset_scalers, tell_of_unscaling
from .holding import Holding
from .member_state import MemberState, groups_of, random_states, restore_random_states, set_groups
from .patches import (
    SharedState,
    clone_state,
    note_backward,
    note_batches,
    note_losses,
    replace_step,
    sort_out,
)
from .place import LoopPlace
from .schedules import Schedules, adopt, settings_text
from .unprepared import Guard, Strays


class Prepared:
    """The objects of one script, taking part in a run.

    Args:
        objects: what was given to ``prepare``.
        batch: what the loader's batch size means.
        fast: ``auto`` or ``none``, and the loop's own (model, batch) -> loss where it is known.
    """

    def __init__(
        self,
        session: Exchange,
        context: Context,
        objects: tuple[Any, ...],
        device: torch.device,
        batch: str,
        keeper: MemberState,
        fast: tuple[str, Forward | None] = ("none", None),
    ) -> None:
        self._session = session
        self._member = session.shared
        self._context = context
        self._device = device
        self._keeper = keeper
        model, optimizer, loader = sort_out(objects)
        refuse_what_cannot_be_carried(model, optimizer)
        self.model: nn.Module = model
        self.optimizer: Optimizer = optimizer
        counted = LeasedLoader(loader, context.seed, device)
        is_alone = self.is_alone  # then nothing is drawn: it would be missing in the loop
        sizes = plain_sizes(loader) if is_alone else counted.order.count()
        num_samples, self.num_batches = sizes
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
        self.leased.order = counted.order  # it knows how many positions an epoch has
        is_chosen = context.precision is not None
        self.amp = Amp(optimizer, device, speed.precision if is_chosen else None)
        self.is_iterating = False
        self.iteration: weakref.ref[Generator[Any, None, None]] | None = None
        """Of the loader's own loop, the newest."""
        self.num_nested = 0
        """Iterations inside its own loop that are not over."""
        self.has_nested = False
        """Whether the loader was iterated inside its own loop since the last batch."""
        self.is_failing = False
        """Whether an exception of the script's own has left a step block."""
        self.has_left = False
        self._error: ConfigError | WorkerError | None = None
        self._has_accumulated = False
        """Whether something lay in ``.grad`` when the last block ended; a gradient may be zero."""
        self.holding = Holding(is_local=context.is_difference)
        self.given_back: list[Any] = []
        self._batch: Any = None
        self.loss: Tensor | None = None
        self._local_loss = math.nan
        self.edits: Edits | None = None
        self.clipping = Clipping(
            model,
            is_local=context.is_difference or self._member is None,
            unscale=self._unscale,
            give_away=self._give_away,
        )
        self.scaling = Scaling(session, model, optimizer, is_local=context.is_difference)
        self._parameters = list(model.parameters())
        self._injected = InjectedDelay.of(context, session.seat)
        plan = FaultPlan.parse(context.fault, context.workers)
        self._faults = WorkerFaults(plan.of_worker(session.seat))
        self._begun_s = time.perf_counter()
        self._step_optimizer, self._zero_grad = optimizer.step, optimizer.zero_grad
        replace_step(optimizer, self._step)
        if not self.is_alone:
            optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        self.schedules = self._find_schedules(objects)

    def _find_schedules(self, objects: tuple[Any, ...]) -> Schedules:
        session, context = self._session, self._context
        place = LoopPlace(
            session,
            lambda: self.is_iterating,
            is_lockstep=context.is_spmd or context.workers == context.parts == 1,
            is_local=context.is_difference,
            is_newcomer=context.is_newcomer,
        )
        return Schedules(
            objects,
            self.optimizer,
            place,
            words=None if self._member is None else self._member.rhythm,
            num_workers=session.num_workers,
            most=MOST_SCHEDULES,
            skips=context.nonfinite == "skip",
            tell=self.tell_settings,
        )

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
            steps_itself=context.is_difference or self._member is None,
            forward=forward,
        )
        return settle(script, context, fast)

    def attach(self, session: StoreExchange) -> None:
        """Join a run of several workers: move the model's memory, replace what must be shared."""
        rule = self.optimizer
        if self._context.is_difference:
            # Frozen ones as well, whose difference is 0: they may thaw.
            floating = [one for one in self.model.parameters() if one.is_floating_point()]
            rule = torch.optim.SGD(floating, lr=1.0)
        self._keeper.load(self.model, self.optimizer, is_difference=self._context.is_difference)
        self._remember()
        replica = Replica(self.model, self.optimizer, rule)
        if self._context.cancels:
            watch_forward(self.model, session.check)
        self.leased.seeds_between = session.num_workers > 1
        hooks, at = session.hooks, pinned_at(replica.layout, session.num_workers)
        hooks.order_digest = self.leased.order.fingerprint
        hooks.advance_schedule, hooks.marks = self.schedules.advance, self.schedules.marks
        if self._context.is_difference:
            hooks.num_own_steps = lambda: self.schedules.place.num_run_steps
        hooks.adopt = lambda text: adopt(text, self.optimizer, self.schedules)
        hooks.write_into, hooks.write_own = self._keeper.write_into, self._keeper.write
        hooks.write_layout = lambda number: self._keeper.write_layout(number, replica.layout, at)
        session.attach(replica, rule, self.shape, self._describe(replica))
        clone_state(self.model)
        self._strays = Strays(self.model.parameters())
        note_losses(self.note_loss)
        if not self._context.is_difference:
            state = SharedState(self.optimizer, session.optimizer_state, lambda: session.has_opened)
            hooks.take_loaded, hooks.check_objects = state.take_loaded, state.check
            self._watch_edits(replica)
        if session.num_workers > 1:
            note_batches(self.note_batch)
            Guard(self.optimizer, session.grant, lambda: session.is_over).begin()

    def _watch_edits(self, replica: Replica) -> None:
        """Find what changes a gradient on its way, but for a scaler."""
        edits = self.edits = Edits(replica, is_refused=self._context.averages)

        def before_backward() -> None:
            replica.held.check_kinds()
            edits.before_backward()

        note_backward(before_backward, edits.after_backward)
        tell_of_unscaling(edits.check, edits.explained)

    def _remember(self) -> None:
        """What a checkpoint has of this member, beside model and optimizer state."""
        add, optimizer = self._keeper.add, self.optimizer
        if self._context.is_difference:
            add("optimizer", optimizer.state_dict, optimizer.load_state_dict)
        add("groups", lambda: groups_of(optimizer), lambda rows: set_groups(optimizer, rows))
        for number, schedule in enumerate(self.schedules):
            add(f"schedule {number}", schedule.remember, schedule.go_on)
        add("steps", self.schedules.place.remember, self.schedules.place.go_on)
        add("scale", self.scaling.remember, self.scaling.go_on)
        if self._member is not None:
            add("skipped", self._member.num_skipped, self._member.begin_skipped)
        add("order", self.leased.order.digest, self.leased.order.expect)
        rng = self._injected.rng
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
            "notes": [
                *context.notes,
                *self.settled.notes,
                *batch_norm_note(self.model, self.shape.batch_size, context.parts),
            ],
            "could_try": list(self.settled.could_try),
            "rounding": list(self.settled.rounding),
            "samples": sample_digests(self.leased.loader) if context.workers > 1 else [],
        }

    def tell_settings(self) -> None:
        """What learning rates and schedules are, for a worker that comes later, if one may."""
        if self._context.respawn and self._member is not None and self.schedules.knows:
            self._member.tell_settings(settings_text(self.optimizer, self.schedules))

    def note_loss(self, loss: Tensor) -> None:
        """A backward pass begins; the loss is what the next push reports."""
        self.loss = loss.detach()
        self._strays.look(loss)
        if self.holding.has_accumulated and self._is_zeroed():
            self.holding.zeroed()
        self.holding.differentiated()

    def note_batch(self, dataset: object) -> None:
        """A loader gave a batch of this; inside the loop and with gradients, it trains."""
        is_in_loop = self.is_iterating and not self.num_nested and torch.is_grad_enabled()
        if not is_in_loop or not self.model.training or isinstance(dataset, SeededData):
            return
        assert self._member is not None
        number = f"{len(dataset)} samples" if isinstance(dataset, Sized) else "no known size"
        self._member.say(
            f"a second DataLoader, of {number}, is used inside the loop and was not prepared: "
            "every worker goes through all of it; for a part each: DataLoader(data, "
            "sampler=range(pace.worker, len(data), pace.num_workers), batch_size=...)"
        )
        note_batches(lambda _: None)

    def _is_zeroed(self) -> bool:
        """Whether what was accumulated is gone: there was something, and there is nothing now."""
        return self._has_accumulated and not self._has_gradients()

    def _has_gradients(self) -> bool:
        """Whether anything is accumulated; on accelerators, whether there is memory for it."""
        grads = (one.grad for one in self._parameters if one.grad is not None)
        return any(one.device.type != "cpu" or bool(one.any()) for one in grads)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Replaces ``optimizer.zero_grad``: what was accumulated is left unused."""
        self._zero_grad(set_to_none=set_to_none)
        self.holding.zeroed()
        self._take_back()

    # -- mini-batches, one worker -----------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """Whether this is plain PyTorch: one worker in its own process."""
        return self._member is None

    def batches_alone(self) -> Iterator[Any]:
        """The user's loader, on this worker's device."""
        return plain_batches(self.leased.loader, self._device, self.settled.speed)

    def take_alone(self, batch: Any) -> Any:
        self._batch = batch
        return batch

    # -- mini-batches, one of several workers -----------------------------------------------------

    def next_lease(self) -> Lease | None:
        """The next mini-batch of this worker; None: the epoch is over.

        Asked for inside a step block, it is one more of that block.
        """
        member, holding = self._member, self.holding
        assert member is not None
        self._refuse_side_by_side()
        self.is_failing = False
        is_inside = member.is_in_step
        if not is_inside:
            self.close()
        while (grant := member.grant()) is not None:
            self._follow(grant)
            if depth := self.leased.lookahead:
                self.leased.reserve(member.upcoming(depth))
            if (lease := holding.take()) is not None:
                return lease
            is_short = is_inside or holding.has_accumulated or self._context.is_difference
            if is_short and (more := member.extend()) is not None:
                holding.add(more)
                continue
            if is_inside:  # its block is still to step
                self.has_left = True
                return None
            self._push_what_is_done()
        holding.follow(None)
        return None

    def _refuse_side_by_side(self) -> None:
        """Raise ConfigError where the loader is iterated twice at once: zip(loader, loader)."""
        if self.num_nested:
            raise ConfigError(
                "the prepared loader is iterated a second time beside its own loop, and there it "
                "gives every worker all samples; give the second stream a DataLoader of its own"
            )

    def take(self, lease: Lease) -> Any:
        """The batch of ``lease``."""
        self.has_nested = False
        return self.leased.fetch(lease)

    def close(self) -> None:
        """A step block has ended, or the next batch is asked for: the work on this one is done."""
        if self._member is None:
            return
        is_due = self.holding.close()
        if self.holding.has_accumulated:
            self._has_accumulated = self._has_gradients()
        if is_due:
            self._push_what_is_done()
        elif self.holding.is_owed:
            self._push(Work())

    def _push_what_is_done(self) -> None:
        work = self.holding.work()
        work.loss, self._local_loss = self._local_loss, math.nan
        self._push(work)

    def _push(self, work: Work) -> bool:
        """Push, wait for the release, pull; False: the work was called off before."""
        assert self._member is not None
        try:
            self._member.push(work)
        except Superseded:
            if self._member.is_in_step:
                raise
            self.superseded()
            return False
        self.holding.pushed(work)
        self._follow(self._member.grant())
        return True

    def _follow(self, grant: Grant | None) -> None:
        if not self.holding.follow(grant):
            self._drop_gradients()

    def superseded(self) -> None:
        """The work in flight is another's: forget it and wait for what comes next."""
        self.replica_drop()
        reset_scalers(self.optimizer)
        self._session.superseded()
        self.scaling.follow()

    def leave(self) -> None:
        """The loop was left before the epoch's end."""
        self.has_left = True
        if self.is_failing:
            return  # the worker ends, and nobody is waited for
        try:
            self.finish_leaving()
        except Stopped:
            pass
        except (ConfigError, WorkerError) as error:
            self._error = error  # a generator that is closed cannot raise it

    def end_iteration(self) -> None:
        """The script has no more epochs: an iterator that it did not come to the end of ends."""
        if self.is_alone:
            return
        iteration = None if self.iteration is None else self.iteration()
        if self.is_iterating and iteration is not None:
            iteration.close()
        self.finish_leaving()

    def finish_leaving(self) -> None:
        """End the epoch for all workers, if this one has left it."""
        member, holding = self._member, self.holding
        if self._error is not None:
            raise self._error
        if member is None or not self.has_left:
            return
        self.has_left = False
        self.close()
        if member.grant() is not None and holding.work().weight:
            self._push_what_is_done()
        if member.grant() is not None:
            rest = holding.work()
            member.leave_epoch(rest.kept, is_look=not holding.has_worked)
            holding.pushed(rest)
        holding.follow(None)

    def to_device(self, batch: Any) -> Any:
        if self._device.type == "cpu":
            return batch
        return apply(lambda tensor: tensor.to(self._device), batch)

    # -- one step ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.holding.has_worked = True
        self._begun_s = time.perf_counter()
        self.is_failing = False

    def weigh(self, weight: float) -> None:
        """See ``Step.weight``."""
        if not (weight >= 0.0 and math.isfinite(weight)):
            raise ConfigError(f"step.weight must be >= 0 and finite, got {weight}")
        current = self.holding.current
        if current is not None:
            if current.is_used and not self._context.is_difference:
                raise ConfigError("step.weight was set after optimizer.step(); set it before")
            current.weight = float(weight)

    def explain(self, error: Exception) -> None:
        """The first step failed, and speaks of sizes: that a batch is shared may be why."""
        size, parts = self.leased.loader.batch_size, self._context.parts
        is_shared = size == self.shape.batch_size and parts > 1
        is_first = self.schedules.place.num_run_steps == 0
        if is_shared and is_first and re.search("size|shape|dimension|length", str(error)):
            error.add_note(
                f"a batch of {size} is shared by {parts} mini-batches; for a script that counts on "
                f"{size} samples in each: pace.prepare(..., batch='per-worker')"
            )

    def _unscale(self) -> None:
        scale = self.amp.unscale()
        self.loss = None if self.loss is None else self.loss / scale

    def _give_away(self) -> None:
        if self.edits is not None:
            self.edits.is_final = True

    def _take_back(self) -> None:
        """There is nothing that could be clipped, or must not change."""
        self.clipping.drop()
        if self.edits is not None:
            self.edits.dropped()

    def skip(self) -> None:
        """See ``Step.skip``."""
        self.replica_drop()
        if self._member is None:
            self.given_back.append(self._batch)
            return
        self._member.give_back()
        self.scaling.follow()

    def replica_drop(self) -> None:
        """Forget the gradients of work that does not count."""
        self.holding.forget()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self.loss = None
        self.amp.is_waiting = False
        self._take_back()
        for parameter in self._parameters:
            parameter.grad = None

    def _step(self, closure: Callable[[], float] | None = None) -> None:
        """Replaces ``optimizer.step``: push, wait for the release, pull."""
        try:
            self._make_step(closure)
        except ConfigError:
            self.is_failing = True
            raise

    def _make_step(self, closure: Callable[[], float] | None) -> None:
        if closure is not None:
            raise ConfigError("optimizer.step(closure) calls the model again; step without one")
        current = self.holding.current
        if self._member is not None and current is None:
            raise ConfigError(
                "optimizer.step() was called outside the prepared loader: there is no mini-batch "
                "that the update could stand for"
            )
        if current is not None and current.is_called_off:
            return  # outside the block that said so
        if self.amp.is_waiting:
            self.amp.step()  # it comes back here with what the scaler found
            return
        self.amp.check()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.leased.fetch_ahead()  # the device is still at work on this batch
        if self.edits is not None:
            refuse_hooks(self.optimizer)
            self.edits.check()
        asked = Work(clip=self.clipping.take())
        asked.loss = float(self.loss) if self.loss is not None else math.nan
        self.loss = None
        if self._member is None:
            self._step_alone(asked)
        else:
            self._step_with_others(self._member, asked)
        self.clipping.fill(self._session.last_norm)
        if self.edits is not None:
            self.edits.pushed()

    def _step_with_others(self, member: StoreExchange, asked: Work) -> None:
        holding = self.holding
        is_more = holding.is_finished
        num_steps = holding.stepped()
        if num_steps > 1 and not self._context.is_difference:
            self._check_that_all_step_again(member)
        grant = member.grant()
        if grant is None:
            raise ConfigError(
                "optimizer.step() was called after the epoch's last mini-batch was done, and an "
                "update needs one; step on what was accumulated inside the loop: "
                "if (i + 1) % n == 0 or i + 1 == len(loader): optimizer.step()"
            )
        self._inject(grant.ticket.serial)
        self.scaling.read(asked)
        self._begin_step(grant.ticket.version, asked)
        if self._context.is_difference:
            member.unedited.check()
            if not asked.found_inf:
                self._step_optimizer()
            member.unedited.mark()
            self.schedules.end_step()
            self._local_loss = asked.loss
            return
        keeps = num_steps < holding.steps_a_batch
        counts = holding.again() if is_more else holding.work(keeps=keeps)
        work = replace(
            asked, num_samples=counts.num_samples, weight=counts.weight, kept=counts.kept,
            unused=counts.unused,
        )  # fmt: skip
        if self._push(work):
            self.schedules.end_step()

    def _begin_step(self, version: int, work: Work) -> None:
        """Schedulers count the steps of the loop."""
        has_scaled = self.amp.has_scaled
        self.schedules.begin_step(version, found_inf=work.found_inf, has_scaled=has_scaled)

    def _check_that_all_step_again(self, member: StoreExchange) -> None:
        """Raise ConfigError unless a second step on one batch is what all members do now."""
        if self.has_nested:
            raise ConfigError(
                "optimizer.step() was called for a batch of a second iteration over the prepared "
                "loader, inside the first, which is not over; leave the first one before, or loop "
                "over a loader of its own"
            )
        if not self._context.is_spmd or member.grant() is None:
            raise ConfigError(
                "optimizer.step() was called twice for one mini-batch; with several workers only "
                "full-sync carries that (--protocol full-sync), and not on the only mini-batch of "
                "the run: step once, or give each step a mini-batch of its own"
            )

    def _inject(self, serial: int) -> None:
        """What ``--delay``, ``--slow`` and ``--fault`` ask for, between gradient and push."""
        session, faults = self._session, self._faults
        now_s = time.perf_counter()
        self._injected.catch_up(serial)
        hold_s = self._injected.seconds(self._begun_s, now_s)
        if faults:
            for fault in faults.due(session.version, session.trained_s):
                session.inject(fault)
            factor = faults.factor(session.trained_s)
            hold_s = (now_s - self._begun_s + hold_s) * factor - (now_s - self._begun_s)
        if hold_s > 0.0:
            session.sleep(hold_s)

    def _step_alone(self, work: Work) -> None:
        session = self._session.alone
        assert session is not None
        self._inject(session.version)
        self.scaling.read(work)
        self._begin_step(session.version, work)
        if work.found_inf or not self._is_finite(work):
            session.skip()
        else:
            self._step_optimizer()
            session.push()
        self.schedules.end_step()

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
