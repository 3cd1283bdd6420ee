"""Steps that are more than torch's own: a closure that is called again, hooks behind the step.

    torch's own, first order     the closure is called once, and the step is taken as without one
    LBFGS, hooks before or behind a step, an optimizer of the user's own that calls the model
    again, keeps numbers beside its state, or looks at all its parameters:
      one worker                 its own step, plain
      local-sgd                  its own step, on this worker's mini-batch
      full-sync                  its own step in every worker, on the mean of all gradients:
                                 closure -> own gradient -> mean over all workers -> optimizer

In the last, a worker without a mini-batch of a version steps all the same, with a closure that
only takes the means (``exchange/lockstep.py``), so that its optimizer stays equal to the others'.
Above 300 lines, since which steps are supported and how they are made are read together.
This module must not know how means are made.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ..context import Context
from ..errors import ConfigError
from ..exchange.base import Exchange, not_finite
from ..exchange.lockstep import Stage
from ..store.optimizer_copy import (
    has_hooks,
    inner_of,
    is_made_late,
    own_memory,
    reads_others,
    too_mixed_to_fuse,
)
from .gradients import LocalGradients
from .loop import TrainingLoop

Closure = Callable[..., Any]

NOTE_OF_CLOSURES = (
    "whole steps (a closure, step hooks, an optimizer with numbers of its own): every worker runs "
    "the optimizer itself; each evaluation of a step "
    "averages the gradients and the loss of all workers, and the steps of a block are one version"
)
"""A note for the plan on steps that all workers make together."""


def calls_once(optimizer: Optimizer) -> bool:
    """Whether its ``step`` calls a closure once, before all else: all of torch's own but LBFGS."""
    is_torch = type(optimizer).step.__module__.startswith("torch.optim.")
    return is_torch and not isinstance(optimizer, LBFGS)


def context_with(
    context: Context,
    optimizers: Sequence[Optimizer],
    *,
    asked: bool,
    has_others: bool,
    is_split: bool = False,
) -> Context:
    """The context, changed for optimizers that call the model again, or have hooks.

    Args:
        asked: whether ``prepare`` got ``closures=True``.
        has_others: whether a coordinator hands out the work.
        is_split: whether each worker has a part of the model.

    Raises:
        ConfigError: the protocol, or a setting, is not possible with them.
    """
    has_lbfgs = any(isinstance(optimizer, LBFGS) for optimizer in optimizers)
    if not (has_lbfgs or asked):
        is_pushed = has_others and not context.is_difference
        if is_pushed and any(has_hooks(optimizer) for optimizer in optimizers):
            return _with_hooks(context)
        return _with_own(context, optimizers, is_split=is_split) if is_pushed else context
    name = "LBFGS" if has_lbfgs else "closures=True"
    if context.nonfinite == "skip":
        raise ConfigError(
            f"{name}: a step calls the model several times, and --nonfinite skip cannot skip a "
            "part of it; leave that setting out"
        )
    if context.fast == "auto":
        raise ConfigError(
            f"{name}: --fast auto times steps without a closure; choose by hand (--compile, "
            "--threads, --channels-last)"
        )
    if not has_others or context.is_difference:
        return context
    if not context.is_spmd:
        raise ConfigError(
            f"{name}: a step may call the model several times, each time at other weights, and "
            f"under {context.protocol} workers have different ones; use --protocol full-sync "
            "(all workers make each step together) or --protocol local-sgd:1"
        )
    return replace(context, steps_together=True, is_difference=True)


def _with_hooks(context: Context) -> Context:
    """The context for optimizers with step hooks, which need whole steps in every worker."""
    if not context.is_spmd:
        raise ConfigError(
            f"an optimizer has step hooks, but under {context.protocol} the worker that comes last "
            "makes an update, on a part of the parameters; use --protocol full-sync (all "
            "workers make each step together) or --protocol local-sgd:1"
        )
    if context.nonfinite == "skip" or context.fast == "auto":
        setting = "--fast auto" if context.fast == "auto" else "--nonfinite skip"
        raise ConfigError(
            f"{setting} is not supported with step hooks of an optimizer, whose steps all workers "
            "make together; leave that setting out, or use --protocol local-sgd:1"
        )
    return replace(context, steps_together=True, is_difference=True)


def _with_own(context: Context, optimizers: Sequence[Optimizer], *, is_split: bool) -> Context:
    """The context for optimizers of the user's own, some of which need whole steps."""
    for optimizer in optimizers:
        memory, name = own_memory(optimizer), type(optimizer).__name__
        if is_split and memory.startswith("self.") and not inner_of(optimizer):
            memory = ""  # each part has one twin, which makes all of its steps
        if memory and not context.is_spmd:
            raise _refused_memory(optimizer, memory, context)
        if not context.is_spmd or not (memory or reads_others(optimizer)):
            continue
        if context.nonfinite == "skip" or context.fast == "auto":
            setting = "--fast auto" if context.fast == "auto" else "--nonfinite skip"
            what = f"keeps {memory} from step to step" if memory else "looks at all its parameters"
            raise ConfigError(
                f"{setting} is not supported with {name}, which {what} and is stepped by all "
                "workers together; leave that setting out, or use --protocol local-sgd:1"
            )
        return replace(context, steps_together=True, is_difference=True)
    return context


def _refused_memory(optimizer: Optimizer, memory: str, context: Context) -> ConfigError:
    does = f"keeps {memory} from step to step"
    instead = "keep it for each parameter, self.state[p]['t']"
    if is_made_late(memory):
        does, instead = f"makes {memory} later than in its first step", "make it in the first one"
    if inner_of(optimizer):
        does, instead = f"steps another optimizer, {memory}", "write its step without one"
    return ConfigError(
        f"{type(optimizer).__name__} {does}, but under {context.protocol} the worker that "
        f"comes last makes an update, with a value of its own: {instead}, or use "
        "--protocol full-sync (all workers make each step together) or --protocol local-sgd:1"
    )


class OwnSteps:
    """The steps that the user's optimizers make in this worker.

    Args:
        own_step: the original ``step`` of each optimizer.
    """

    def __init__(
        self,
        exchange: Exchange,
        context: Context,
        optimizers: Sequence[Optimizer],
        own_step: Sequence[Callable[..., Any]],
        gradients: LocalGradients,
        loop: TrainingLoop,
    ) -> None:
        self._exchange, self._member = exchange, exchange.shared
        self._context, self._optimizers = context, optimizers
        self._own_step = own_step
        self._gradients, self._loop = gradients, loop
        self.is_together = context.steps_together
        """Whether all members make each step together, on the mean of their gradients."""

    # -- before the step ------------------------------------------------------------------------

    def calls_first(self, part: int) -> bool:
        """Whether the closure is called once, before a step without one.

        Raises:
            ConfigError: it may call the closure more than once, and that is not supported here.
        """
        optimizer = self._optimizers[part]
        if (accumulation := self._loop.accumulation) is not None:
            raise ConfigError(
                f"optimizer.step(closure) with accumulate {accumulation.num_batches}: a closure "
                "recomputes the gradients of its own batch in each step; call it first, and then "
                "optimizer.step() without one"
            )
        if self.is_together:
            return False
        if calls_once(optimizer):
            return True
        if self._member is not None and not self._context.is_difference:
            raise ConfigError(
                f"optimizer.step(closure): {type(optimizer).__name__} may call the model several "
                "times a step; to allow it under full-sync or local-sgd: "
                "pace.prepare(..., closures=True); torch's own optimizers need no flag, since "
                "they call it once"
            )
        if self._context.nonfinite == "skip":
            raise ConfigError(
                f"optimizer.step(closure): {type(optimizer).__name__} may call the model several "
                "times a step, and --nonfinite skip cannot skip a part of it; leave that "
                "setting out"
            )
        return False

    def check(self, part: int, closure: Closure | None) -> None:
        """Check a step before it. ConfigError: LBFGS has no closure, or a scaler steps it."""
        optimizer = self._optimizers[part]
        if closure is None and isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS calls the model several times a step, but this loop gives it no closure: "
                "optimizer.step(closure), with zero_grad(), the loss and its backward() in it"
            )
        if closure is not None or self.is_together:
            self._refuse_scaled(optimizer)

    def _refuse_scaled(self, optimizer: Optimizer) -> None:
        has_scaler = getattr(optimizer, "found_inf", None) is not None
        if has_scaler or self._gradients.amp.is_waiting:
            raise ConfigError(
                "a step that may call the model several times takes no scaled losses: leave out "
                "the GradScaler, and use bf16: pace.autocast(torch.bfloat16)"
            )

    # -- the step -------------------------------------------------------------------------------

    def make(self, part: int, closure: Closure | None) -> Any:
        """Make the optimizer's own step; return its result."""
        if self.is_together:
            self._average(Stage.STEPS if closure is None else Stage.ENTERS, part)
        return self._step(part, *([] if closure is None else [self._evaluated(part, closure)]))

    def _step(self, part: int, *closure: Closure) -> Any:
        """Torch's method, by its usual kernel where the one-pass kernel cannot make this step."""
        optimizer = self._optimizers[part]
        mixed = too_mixed_to_fuse(optimizer, has_closure=bool(closure))
        for number in mixed:
            optimizer.param_groups[number]["fused"] = False
        try:
            return self._own_step[part](*closure)
        finally:
            for number in mixed:
                optimizer.param_groups[number]["fused"] = True

    def _evaluated(self, part: int, closure: Closure) -> Closure:
        """The closure as the optimizer calls it."""
        edits = self._gradients.edits if self.is_together else None

        def evaluate(*arguments: Any, **options: Any) -> Any:
            if edits is not None:
                edits.explained()  # changes that the optimizer itself made to the mean
            loss = closure(*arguments, **options)
            self._refuse_scaled(self._optimizers[part])
            if self.is_together:
                return self._mean(part, loss)
            if self._member is None:
                self._refuse_not_finite(part)
            return loss

        return evaluate

    def _mean(self, part: int, loss: Any) -> Any:
        """The mean loss of all members; ``.grad`` is the mean of their gradients from here on."""
        value = math.nan if loss is None else float(getattr(loss, "detach", lambda: loss)())
        mean = self._average(Stage.EVALUATED, part, value)
        if isinstance(loss, Tensor):
            return torch.tensor(mean, dtype=torch.float64)  # the same bits in all members
        return None if loss is None else mean

    def clip(self) -> None:
        """Make ``.grad`` the mean, before it is clipped."""
        self._average(Stage.CLIPS, 0)

    def _average(self, stage: Stage, part: int, loss: float = math.nan) -> float:
        member, current, edits = self._member, self._loop.holding.current, self._gradients.edits
        assert member is not None
        assert edits is not None
        if current is None or current.is_called_off:
            raise ConfigError(
                "gradients were clipped outside the prepared loader's loop, where they belong to "
                "no mini-batch"
            )
        edits.check()
        self._refuse_not_finite(part)
        mean = member.average_together(stage, part, weight=current.share, loss=loss)
        edits.explained()
        return mean

    def _refuse_not_finite(self, part: int) -> None:
        """Raise WorkerError where an evaluation gave a gradient that is not finite."""
        if (name := self._gradients.first_not_finite(part)) is None:
            return
        exchange, loss = self._exchange, self._gradients.loss
        value = None if loss is None else float(loss)
        raise not_finite(
            exchange.seat, name, exchange.version, exchange.version, value, can_skip=False
        )

    # -- without a mini-batch -------------------------------------------------------------------

    def follow(self, part: int, *, has_closure: bool) -> None:
        """Make the step of the others, in a version of which this member has no mini-batch."""
        member = self._member
        assert member is not None
        if not has_closure:
            self._step(part)
            return

        def evaluate(*_: Any, **__: Any) -> Tensor:
            return torch.tensor(member.follow_evaluation(), dtype=torch.float64)

        self._step(part, evaluate)
