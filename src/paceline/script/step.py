"""One step of a script: its block, and the optimizer's step that pushes.

    with pace.step():          begin        is left early where its work is superseded
        optimizer.zero_grad()  drops what was accumulated
        ... backward()
        optimizer.step()       [ injected delay ] -> read the scaler -> push, wait, pull
                               closed       the next push includes what was accumulated

Each of several optimizers does the same by itself where members step together, or step locally.
Elsewhere a block is one push: ``step`` sets its gradients aside, and the end of the block pushes
them together. Both methods are replaced on each optimizer object. Above 300 lines,
since the kinds of step (alone, here, at once, with its block) are read side by side. This module
must not know how an exchange carries anything, nor how batches come to the loop.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from ..conditions.faults import FaultPlan, WorkerFaults
from ..conditions.slowness import InjectedDelay
from ..context import Context
from ..data.numbers import Numbers
from ..errors import ConfigError
from ..events import Grant
from ..exchange.base import Exchange, Superseded, Work, not_finite
from ..exchange.through_store import StoreExchange
from ..replica.rates import Warmup
from ..replica.replica import Hyper, hyper_of, refuse_hooks
from ..replica.seeding import kept_random_state
from .closures import Closure, OwnSteps
from .gradients import LocalGradients
from .loop import TrainingLoop
from .patches import replace_step
from .schedules import Schedules


class Step:
    """One step on one mini-batch; its end closes the work.

    Attributes:
        was_superseded: whether its work was abandoned; set when the block has ended.
        weight: the weight of the mini-batch in its update, >= 0; set it before
            ``optimizer.step()``. Default: its number of samples, which is right for a loss that is
            a mean over them. A mean over tokens needs the number of tokens.
    """

    def __init__(self, loop: TrainingLoop, explain: Callable[[Exception], None]) -> None:
        self._loop = loop
        self._explain = explain
        self._weight: float | None = None
        self.was_superseded = False

    @property
    def weight(self) -> float | None:
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        self._loop.weigh(float(value))
        self._weight = float(value)

    def skip(self) -> None:
        """Return this step's mini-batch undone; it is handed out again."""
        self._loop.skip()

    def __enter__(self) -> "Step":
        self._loop.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        if kind is None:
            try:
                self._loop.push_steps()
            except Superseded as late:
                kind, error = type(late), late
        self._loop.exit()
        if kind is None:
            self._loop.close()
            return False
        if not issubclass(kind, Superseded):
            self._loop.is_failing = True
            if isinstance(error, RuntimeError | ValueError):
                self._explain(error)
            return False
        self.was_superseded = True
        if (modes := self._loop.modes) is not None:
            modes.put_back()
        self._loop.superseded()
        return True


class OptimizerStep:
    """Replaces ``optimizer.step`` in a run, and ``zero_grad`` among several workers.

    Args:
        optimizers: one or several, over different parameters.
        warmup: is stepped after each of their steps; None: there is none.

    Attributes:
        injection: slows the step down or lets it fail, where that was asked for.
    """

    def __init__(
        self,
        context: Context,
        optimizers: Sequence[Optimizer],
        gradients: LocalGradients,
        loop: TrainingLoop,
        schedules: Schedules,
        warmup: Warmup | None = None,
    ) -> None:
        self._exchange = exchange = loop.exchange
        self._warmup = warmup
        self._member = exchange.shared
        self._context = context
        self._optimizers = optimizers
        self._own_zero_grad = [zero_grad_of(optimizer) for optimizer in optimizers]
        is_several = len(optimizers) > 1
        is_shared = not (loop.is_alone or context.is_difference)
        self._waits = is_several and is_shared and not context.steps_apart
        """Whether the steps of a block are pushed together, when it ends."""
        self._settings: dict[int, Hyper] = {}
        """The settings of optimizers that wait for that."""
        self._gradients = gradients
        self._loop = loop
        self._schedules = schedules
        self._has_left_out = False
        """Whether it was said that a step which is not finite is skipped."""
        own_step = [optimizer.step for optimizer in optimizers]
        self.own = OwnSteps(exchange, context, optimizers, own_step, gradients, loop)
        self.injection = Injection(exchange, context)
        if is_several and is_shared and context.steps_apart:
            loop.holding.steps_a_batch = len(optimizers)
        schedules.place.was_called_off = lambda: loop.was_called_off
        if self._waits:
            loop.push_steps = self._push_steps
            schedules.place.waits = self._is_waiting
        for part, optimizer in enumerate(optimizers):
            replace_step(optimizer, partial(self._step, part))
            if not loop.is_alone:
                optimizer.zero_grad = partial(self._zero_grad, part)  # type: ignore[method-assign]  # of this optimizer alone

    def begin(self) -> None:
        """Begin a step block."""
        holding = self._loop.holding
        holding.has_worked = holding.has_stepped = True
        self._loop.is_failing = self._loop.was_called_off = False
        self._schedules.place.deferred.clear()  # of a block that was left
        accumulation = self._gradients.accumulation
        if accumulation is None or not accumulation.is_pending:
            self.injection.begin()

    def _zero_grad(self, part: int, set_to_none: bool = True) -> None:
        """Replaces ``optimizer.zero_grad``: drops what was accumulated."""
        self._own_zero_grad[part](set_to_none=set_to_none)
        if len(self._optimizers) == 1:
            self._loop.holding.zeroed()
            self._gradients.take_back()
            return
        if self._loop.holding.has_accumulated and not self._gradients.are_there():
            self._loop.holding.zeroed()  # nor has another optimizer any of it
        self._gradients.take_back(part)

    def _step(self, part: int, *arguments: Any, **options: Any) -> Any:
        """Replaces ``optimizer.step``: push, wait for the release, pull; the closure's loss."""
        try:
            return self._make_step(part, _only_closure(*arguments, **options))
        except ConfigError:
            self._loop.is_failing = True
            raise

    def _make_step(self, part: int, closure: Closure | None) -> Any:
        self._loop.check_leaving()
        current = self._loop.holding.current
        self._loop.holding.has_stepped = True
        if self._member is not None and current is None:
            raise self._outside()
        if current is not None and current.is_called_off:
            return None  # outside the block that would have ended
        self._loop.was_called_off, loss = False, None
        if closure is not None and self.own.calls_first(part):
            with torch.enable_grad():
                loss, closure = closure(), None
        self.own.check(part, closure)
        result = self._make_differentiated(part, closure)
        return loss if closure is None and result is None else result

    def _make_differentiated(self, part: int, closure: Closure | None) -> Any:
        """Make the step, which may still call the closure; return what the optimizer's returned."""
        gradients, optimizer = self._gradients, self._optimizers[part]
        if gradients.amp.is_waiting:
            gradients.amp.step()  # it calls this again with what the scaler found
            return None
        if closure is None:
            gradients.amp.check(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask
        self._loop.leased.fetch_ahead()  # the device is still at work on this batch
        if gradients.edits is not None and not self.own.is_together:
            refuse_hooks(optimizer)
            gradients.edits.check()
        if self._holds(part):
            return None
        if self._waits:
            assert self._member is not None
            self._wait(self._member, part)
            return None
        work, result = gradients.asked(1 << part), None
        if self._member is None:
            result = self._step_alone(part, work, closure)
        elif gradients.aside is None:
            result = self._step_with_others(self._member, part, work, closure)
        else:
            with gradients.aside.only(part):
                self._step_with_others(self._member, part, work)
        gradients.pushed(self._exchange.last_norm)
        if self._warmup is not None:
            self._warmup.step()
        return result

    def _outside(self) -> ConfigError:
        """The error for a step outside the loop."""
        where = "the prepared loader"
        if isinstance(self._loop.leased.loader.sampler, Numbers):
            where = "the loop, for which prepare() got no loader (for number in pace.updates(n))"
        return ConfigError(
            f"optimizer.step() was called outside {where}: the update would belong to no mini-batch"
        )

    def _holds(self, part: int) -> bool:
        """Whether this step is set aside, since its update comes with a later one."""
        gradients, holding = self._gradients, self._loop.holding
        accumulation = gradients.accumulation
        if accumulation is None:
            return False
        if gradients.edits is None:
            accumulation.check(part)
        if not accumulation.is_last:
            gradients.hold(part)
            return True
        weight = gradients.join(part)
        if holding.current is not None:
            holding.current.weight = weight
        return False

    # -- steps that are pushed when their block ends --------------------------------------------

    def _wait(self, member: StoreExchange, part: int) -> None:
        """Set aside the gradients that this optimizer steps on."""
        gradients, optimizer = self._gradients, self._optimizers[part]
        assert gradients.aside is not None
        if not self._exchange.is_in_step:
            raise ConfigError(
                "several optimizers step together when their block ends: call step() inside "
                "`with pace.step():`"
            )
        if gradients.aside.stepped >> part & 1:
            self._check_that_all_step_again(member)
        self._granted(member)
        gradients.scaling.read(Work(), optimizer)  # which refuses a scaler
        self._loop.holding.stepped()
        gradients.set_aside(part)
        self._settings[part] = hyper_of(optimizer)

    def _is_waiting(self, optimizer: Optimizer) -> bool:
        """Whether its step is made when the block ends."""
        aside = self._gradients.aside
        pairs = enumerate(self._optimizers)
        return aside is not None and any(
            aside.stepped >> part & 1 for part, one in pairs if one is optimizer
        )

    def _push_steps(self) -> None:
        """Push what the steps of the block have set aside, when it ends."""
        gradients, member = self._gradients, self._member
        assert gradients.aside is not None
        assert member is not None
        if not (stepped := gradients.aside.stepped):
            return
        parts = [part for part in range(len(self._optimizers)) if stepped >> part & 1]
        try:
            for part in parts:
                self._check_settings(part)
            work = gradients.asked(stepped)
            with gradients.aside.taken():
                self._push(member, parts, work, self._loop.holding.work)
        except ConfigError:
            self._loop.is_failing = True
            raise
        gradients.pushed(self._exchange.last_norm)

    def _check_settings(self, part: int) -> None:
        optimizer = self._optimizers[part]
        if hyper_of(optimizer) != self._settings[part]:
            raise ConfigError(
                f"a setting of {type(optimizer).__name__} (lr, momentum, ...) was changed in the "
                "block after its step(), which takes effect when the block ends; change it before "
                "that step, or after the block"
            )

    # -- steps that are pushed at once ----------------------------------------------------------

    def _granted(self, member: StoreExchange) -> Grant:
        grant = member.grant()
        if grant is None:
            raise ConfigError(
                "optimizer.step() was called after the epoch's last mini-batch was done, and an "
                "update needs one; step on accumulated gradients inside the loop: "
                "if (i + 1) % n == 0 or i + 1 == len(loader): optimizer.step()"
            )
        return grant

    def _step_with_others(
        self, member: StoreExchange, part: int, work: Work, closure: Closure | None = None
    ) -> Any:
        holding = self._loop.holding
        if member.grant() is None and self._exchange.is_stopped:
            # The run ended between two steps of this block, before the first counted.
            return None
        is_more = holding.is_finished
        num_steps = holding.stepped()
        if num_steps > 1:
            self._refuse_nested()
        if self._context.is_difference:
            return self._step_here(member, part, work, closure)
        if num_steps > 1:
            self._check_that_all_step_again(member)
        keeps = num_steps < holding.steps_a_batch
        counts = holding.again if is_more else partial(holding.work, keeps=keeps)
        self._push(member, [part], work, counts)
        return None

    def _step_here(
        self, member: StoreExchange, part: int, work: Work, closure: Closure | None
    ) -> Any:
        """A local step on this member's weights."""
        grant = self._granted(member)
        self.injection.hold(grant.ticket.serial)
        self._begin_step(grant.ticket.version, [part], work)
        member.unedited.check()
        result = None
        if not (work.found_inf or self._leaves_out(member, part, closure)):
            try:
                result = self.own.make(part, closure)
            except Superseded:
                member.unedited.stepped()
                if self._exchange.is_in_step:
                    raise
                self._loop.superseded()
                return None
            finally:
                member.stepped()
        self._schedules.end_step([self._optimizers[part]])
        later = self._gradients.asked(1 << part).loss  # of a closure
        self._loop.local_loss = later if math.isnan(work.loss) else work.loss
        return result

    def _leaves_out(self, member: StoreExchange, part: int, closure: Closure | None) -> bool:
        """Whether to skip this step: its gradient would stay in the optimizer's own state."""
        if self._context.nonfinite != "skip" or closure is not None:
            return False
        name = self._gradients.first_not_finite(part)
        if name is not None and not self._has_left_out:
            self._has_left_out = True
            member.say(
                f"worker {member.seat}: the gradient of {name!r} is not finite: this local step "
                "is skipped, as all such steps are (--nonfinite skip)"
            )
        return name is not None

    def follow(self, part: int, has_closure: bool) -> None:
        """Make the step that all others make, without a mini-batch; see ``ScriptHooks``."""
        member = self._member
        assert member is not None
        member.unedited.check()
        self._begin_step(member.version, [part], Work())
        try:
            self.own.follow(part, has_closure=has_closure)
        finally:
            member.unedited.stepped()
        self._schedules.end_step([self._optimizers[part]])
        self._gradients.pushed(math.nan)

    def _push(
        self,
        member: StoreExchange,
        parts: Sequence[int],
        own: Work,
        counts: Callable[[], Work],
    ) -> None:
        """Push the step of these optimizers, and continue with the next work."""
        grant = self._granted(member)
        self.injection.hold(grant.ticket.serial)
        self._begin_step(grant.ticket.version, parts, own)
        counted = counts()
        work = replace(
            own, num_samples=counted.num_samples, weight=counted.weight, kept=counted.kept,
            unused=counted.unused,
        )  # fmt: skip
        # Members in one process each continue their own random state, in the rest of the block.
        with kept_random_state() if work.kept else nullcontext():
            is_done = self._loop.push(work)
        if is_done:
            self._schedules.end_step([self._optimizers[part] for part in parts])

    def _begin_step(self, version: int, parts: Sequence[int], work: Work) -> None:
        """Read what a scaler left on the optimizer; let schedulers count the loop's steps."""
        optimizers = [self._optimizers[part] for part in parts]
        if len(parts) == 1:
            self._gradients.scaling.read(work, optimizers[0])
        self._schedules.begin_step(
            version,
            optimizers,
            found_inf=work.found_inf,
            has_scaled=self._gradients.amp.has_scaled,
        )

    def _refuse_nested(self) -> None:
        """Raise ConfigError at a second step on one batch, if it is on another iteration's."""
        if self._loop.has_nested:
            raise ConfigError(
                "optimizer.step() was called for a batch of a second iteration over the prepared "
                "loader, inside the first, which is not over; leave the first one before, or loop "
                "over a loader of its own"
            )

    def _check_that_all_step_again(self, member: StoreExchange) -> None:
        """Raise ConfigError unless all members make a second step on one batch now."""
        if not self._context.is_spmd or member.grant() is None:
            raise ConfigError(
                "optimizer.step() was called twice for one mini-batch; with several workers only "
                "full-sync supports that (--protocol full-sync), and not on the last mini-batch of "
                "an epoch: step once, give each step a mini-batch of its own, and where the loop "
                "takes its batches one ahead, leave that to the loader: num_workers=1"
            )

    def _step_alone(self, part: int, work: Work, closure: Closure | None) -> Any:
        exchange = self._exchange.alone
        assert exchange is not None
        self.injection.hold(exchange.version)
        self._begin_step(exchange.version, [part], work)
        result = None
        if work.found_inf or not self._is_finite(part, work):
            exchange.skip()
        else:
            result = self.own.make(part, closure)
            exchange.push()
        self._schedules.end_step([self._optimizers[part]])
        return result

    def _is_finite(self, part: int, work: Work) -> bool:
        """Whether the update is finite. WorkerError: it is not, and such are not skipped."""
        name = self._gradients.first_not_finite(part)
        if name is None or self._context.nonfinite == "skip":
            return name is None
        version = self._exchange.version
        loss = None if math.isnan(work.loss) else work.loss
        raise not_finite(self._exchange.seat, name, version, version, loss)


def zero_grad_of(optimizer: Optimizer) -> Callable[..., None]:
    """A function that clears its gradients: its own, or torch's without the profiler's mark.

    The mark is most of the time that clearing a small model takes, and is read by profilers only.
    """
    own = optimizer.zero_grad
    if "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not Optimizer.zero_grad:
        return own

    def zero_grad(set_to_none: bool = True) -> None:
        if not set_to_none or torch.autograd.profiler._is_profiler_enabled:
            own(set_to_none=set_to_none)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return zero_grad


def note_of_several(num: int, context: Context) -> str:
    """A note for the plan: what a step of one of several optimizers is."""
    if context.is_difference:
        return f"{num} optimizers: each steps on every worker by itself, as in plain PyTorch"
    if context.steps_apart:
        return (
            f"{num} optimizers: each step() is an update, so a block makes as many versions as it "
            "has steps, and each loss sees the result of the steps before it"
        )
    return (
        f"{num} optimizers: the steps of a block are one update, made when the block ends, so all "
        "its gradients are of one version: the second loss sees the first model as it was before "
        "the block; for step after step, as in one process: --protocol full-sync or local-sgd"
    )


def note_of_first_updates(optimizers: Sequence[Optimizer], context: Context) -> list[str]:
    """A note for the plan: a mean of steps is not the step of a mean."""
    first = f"the first {context.num_as_full_sync} updates are"
    others = [type(optimizer).__name__ for optimizer in optimizers if type(optimizer) is not SGD]
    if others and context.workers > 1:
        return [
            f"{first} means of a step that each worker makes with its own {others[0]}, as under "
            "local-sgd:1: they equal full-sync's for torch's SGD only"
        ]
    if context.outer != "none":
        return [f"{first} not full-sync's: outer {context.outer} steps on their means, too"]
    return []


class Injection:
    """Applies ``--delay``, ``--slow`` and ``--fault`` between gradient and push."""

    def __init__(self, exchange: Exchange, context: Context) -> None:
        self._exchange = exchange
        self.delay = InjectedDelay.of(context, exchange.seat)
        plan = FaultPlan.parse(context.fault, context.workers)
        self._faults = WorkerFaults(plan.of_worker(exchange.seat))
        self.begin()

    def begin(self) -> None:
        """Start the clock of a step's work."""
        self._start_s = time.perf_counter()

    def hold(self, serial: int) -> None:
        """Delay or fail the work of this number, now that its gradient is there."""
        exchange, faults = self._exchange, self._faults
        now_s = time.perf_counter()
        self.delay.catch_up(serial)
        hold_s = self.delay.seconds(self._start_s, now_s)
        if faults:
            for fault in faults.due(exchange.version, exchange.trained_s):
                exchange.inject(fault)
            factor = faults.factor(exchange.trained_s)
            hold_s = (now_s - self._start_s + hold_s) * factor - (now_s - self._start_s)
        if hold_s > 0.0:
            exchange.sleep(hold_s)


def _only_closure(*arguments: Any, **options: Any) -> Closure | None:
    """Return the closure that ``step`` was called with. ConfigError: it got anything else."""
    closure: Closure | None = options.pop("closure", None)
    rest = list(arguments)
    if rest and (rest[0] is None or callable(rest[0])):
        closure = rest.pop(0)
    if rest or options:
        given = ", ".join([*map(repr, rest), *(f"{name}=..." for name in options)])
        raise ConfigError(
            f"optimizer.step() is called with {given:.80}, which does not reach the worker that "
            "makes the update: put it into the optimizer's groups (group['name'] = value), from "
            "which its step can read it"
        )
    return closure
