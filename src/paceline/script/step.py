"""One step of a script: its block, and the optimizer's step that pushes.

    with pace.step():          begin        is left early where its work is superseded
        optimizer.zero_grad()  what was accumulated is left unused
        ... backward()
        optimizer.step()       [ injected delay ] -> read the scaler -> push, wait, pull
                               closed       what was accumulated rides on the next push

Both methods of the optimizer are replaced on the object. This module must not know how an exchange
carries anything, nor how batches come to the loop.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from torch.optim import Optimizer

from ..conditions.faults import FaultPlan, WorkerFaults
from ..conditions.slowness import InjectedDelay
from ..context import Context
from ..data.numbers import Numbers
from ..errors import ConfigError
from ..exchange.base import Exchange, Superseded, Work, not_finite
from ..exchange.through_store import StoreExchange
from ..replica.replica import refuse_hooks
from .gradients import LocalGradients
from .loop import TrainingLoop
from .patches import replace_step
from .schedules import Schedules


class Step:
    """One step on one mini-batch; its end closes the work.

    Attributes:
        was_superseded: tells afterwards whether its work was abandoned.
        weight: what the mini-batch weighs in its update, >= 0; set it before ``optimizer.step()``.
            Unset: its samples, which is right for a loss that is a mean over them. A mean over
            tokens needs the number of tokens.
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
        self._loop.exchange.is_in_step = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        self._loop.exchange.is_in_step = False
        if kind is None:
            self._loop.close()
            return False
        if not issubclass(kind, Superseded):
            self._loop.is_failing = True
            if isinstance(error, RuntimeError | ValueError):
                self._explain(error)
            return False
        self.was_superseded = True
        self._loop.superseded()
        return True


class OptimizerStep:
    """What ``optimizer.step`` is in a run, and ``zero_grad`` among several workers.

    Attributes:
        injection: what slows it down or lets it fail, where that was asked for.
    """

    def __init__(
        self,
        context: Context,
        optimizer: Optimizer,
        gradients: LocalGradients,
        loop: TrainingLoop,
        schedules: Schedules,
    ) -> None:
        self._exchange = exchange = loop.exchange
        self._member = exchange.shared
        self._context = context
        self._optimizer = optimizer
        self._own_step, self._own_zero_grad = optimizer.step, optimizer.zero_grad
        self._gradients = gradients
        self._loop = loop
        self._schedules = schedules
        self.injection = Injection(exchange, context)
        replace_step(optimizer, self._step)
        if not loop.is_alone:
            optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def begin(self) -> None:
        """A step block begins."""
        self._loop.holding.has_worked = True
        self._loop.is_failing = False
        self.injection.begin()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Replaces ``optimizer.zero_grad``: what was accumulated is left unused."""
        self._own_zero_grad(set_to_none=set_to_none)
        self._loop.holding.zeroed()
        self._gradients.take_back()

    def _step(self, closure: Callable[[], float] | None = None) -> None:
        """Replaces ``optimizer.step``: push, wait for the release, pull."""
        try:
            self._make_step(closure)
        except ConfigError:
            self._loop.is_failing = True
            raise

    def _make_step(self, closure: Callable[[], float] | None) -> None:
        if closure is not None:
            raise ConfigError("optimizer.step(closure) calls the model again; step without one")
        current = self._loop.holding.current
        if self._member is not None and current is None:
            where = "the prepared loader"
            if isinstance(self._loop.leased.loader.sampler, Numbers):
                where = (
                    "the loop, which prepare() got no loader for (for number in pace.updates(n))"
                )
            raise ConfigError(
                f"optimizer.step() was called outside {where}: there is no mini-batch that the "
                "update could stand for"
            )
        if current is not None and current.is_called_off:
            return  # outside the block that said so
        gradients = self._gradients
        if gradients.amp.is_waiting:
            gradients.amp.step()  # it comes back here with what the scaler found
            return
        gradients.amp.check()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._loop.leased.fetch_ahead()  # the device is still at work on this batch
        if gradients.edits is not None:
            refuse_hooks(self._optimizer)
            gradients.edits.check()
        asked = gradients.asked()
        if self._member is None:
            self._step_alone(asked)
        else:
            self._step_with_others(self._member, asked)
        gradients.pushed(self._exchange.last_norm)

    def _step_with_others(self, member: StoreExchange, asked: Work) -> None:
        loop, holding = self._loop, self._loop.holding
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
        self.injection.hold(grant.ticket.serial)
        self._begin_step(grant.ticket.version, asked)
        if self._context.is_difference:
            member.unedited.check()
            if not asked.found_inf:
                self._own_step()
            member.unedited.mark()
            self._schedules.end_step()
            loop.local_loss = asked.loss
            return
        keeps = num_steps < holding.steps_a_batch
        counts = holding.again() if is_more else holding.work(keeps=keeps)
        work = replace(
            asked, num_samples=counts.num_samples, weight=counts.weight, kept=counts.kept,
            unused=counts.unused,
        )  # fmt: skip
        if loop.push(work):
            self._schedules.end_step()

    def _begin_step(self, version: int, work: Work) -> None:
        """What a scaler has left on the optimizer; schedulers count the steps of the loop."""
        self._gradients.scaling.read(work)
        has_scaled = self._gradients.amp.has_scaled
        self._schedules.begin_step(version, found_inf=work.found_inf, has_scaled=has_scaled)

    def _check_that_all_step_again(self, member: StoreExchange) -> None:
        """Raise ConfigError unless a second step on one batch is what all members do now."""
        if self._loop.has_nested:
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

    def _step_alone(self, work: Work) -> None:
        exchange = self._exchange.alone
        assert exchange is not None
        self.injection.hold(exchange.version)
        self._begin_step(exchange.version, work)
        if work.found_inf or not self._is_finite(work):
            exchange.skip()
        else:
            self._own_step()
            exchange.push()
        self._schedules.end_step()

    def _is_finite(self, work: Work) -> bool:
        """Whether the update can be made; WorkerError where one that cannot is not skipped."""
        name = self._gradients.first_not_finite()
        if name is None or self._context.nonfinite == "skip":
            return name is None
        version = self._exchange.version
        loss = None if math.isnan(work.loss) else work.loss
        raise not_finite(self._exchange.seat, name, version, version, loss)


class Injection:
    """What ``--delay``, ``--slow`` and ``--fault`` ask for, between gradient and push."""

    def __init__(self, exchange: Exchange, context: Context) -> None:
        self._exchange = exchange
        self.delay = InjectedDelay.of(context, exchange.seat)
        plan = FaultPlan.parse(context.fault, context.workers)
        self._faults = WorkerFaults(plan.of_worker(exchange.seat))
        self.begin()

    def begin(self) -> None:
        """The work of a step begins now."""
        self._begun_s = time.perf_counter()

    def hold(self, serial: int) -> None:
        """The gradient of the work of this number is there."""
        exchange, faults = self._exchange, self._faults
        now_s = time.perf_counter()
        self.delay.catch_up(serial)
        hold_s = self.delay.seconds(self._begun_s, now_s)
        if faults:
            for fault in faults.due(exchange.version, exchange.trained_s):
                exchange.inject(fault)
            factor = faults.factor(exchange.trained_s)
            hold_s = (now_s - self._begun_s + hold_s) * factor - (now_s - self._begun_s)
        if hold_s > 0.0:
            exchange.sleep(hold_s)
