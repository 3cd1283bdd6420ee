"""Learning rates for another batch size: scaled by its samples, and warmed up.

    --scale-lr   linear  rate x samples an update averages / samples of the batch it was chosen for
                 sqrt    rate x the square root of that ratio
    --warmup W   update v at  start + (rate - start) v / W,  from W on at rate; start is the rate
                 before scaling, or rate / W if scaling did not raise it

Rates are scaled once, in ``prepare``, in every parameter group and in the schedulers over them; a
scheduler whose rates cannot be scaled is refused. The warm-up is a scheduler like a prepared one,
stepped after each step of the optimizer, so it is saved in checkpoints and equal in all workers. It
sets the rate itself: a script that also changes it is refused. So is one that does not step on
every batch, if the warm-up is given in epochs: their number of steps is unknown then. This module
must not know runs.

Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
arXiv:1706.02677, section 2; the root: Krizhevsky, "One weird trick for parallelizing convolutional
neural networks", arXiv:1404.5997, section 5.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from ..context import Context
from ..errors import ConfigError
from ..fields import Length, read_length

AnyScheduler = schedulers.LRScheduler | schedulers.ReduceLROnPlateau

_RELATIVE = (
    schedulers.LambdaLR, schedulers.MultiplicativeLR, schedulers.StepLR, schedulers.MultiStepLR,
    schedulers.ConstantLR, schedulers.LinearLR, schedulers.ExponentialLR, schedulers.PolynomialLR,
    schedulers.CosineAnnealingLR, schedulers.CosineAnnealingWarmRestarts,
    schedulers.ReduceLROnPlateau,
)  # fmt: skip
"""Schedulers whose rates are multiples of the initial one, except for a floor."""
_FLOORS = ("eta_min", "min_lrs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateScaling:
    """The factor for learning rates, and its reason.

    Args:
        kind: ``none``, ``linear`` or ``sqrt``.
        samples: samples that an update averages, >= 1.
        own: samples of the batch that the rate was chosen for, >= 1.
    """

    kind: str
    samples: int
    own: int

    @property
    def factor(self) -> float:
        """The factor; 1 if nothing is scaled."""
        ratio = self.samples / self.own
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.kind]

    def note(self, rate: float, *, is_script: bool) -> str:
        """Return the note for the plan; ``rate``: the scaled rate of the first group."""
        return (
            f"learning rate {rate:g} = {rate / self.factor:g} x {self.factor:.4g} (--scale-lr "
            f"{self.kind}: an update averages {self.samples:,} samples, it was chosen for "
            f"{self.own:,})"
        ) + ("; a rate that the script sets in its loop is not scaled" if is_script else "")


def scale(
    optimizers: Sequence[Optimizer], all_schedulers: Sequence[AnyScheduler], factor: float
) -> None:
    """Multiply every rate.

    Args:
        all_schedulers: the schedulers over these optimizers, prepared or not.

    Raises:
        ConfigError: an optimizer has no rate, or a scheduler's rates are not multiples of the
            initial one; nothing has been changed then.
    """
    inner_schedulers = [inner for scheduler in all_schedulers for inner in _inner(scheduler)]
    for scheduler in inner_schedulers:
        _check(scheduler)
    for optimizer in optimizers:
        if any("lr" not in group for group in optimizer.param_groups):
            raise ConfigError(
                f"--scale-lr: {type(optimizer).__name__} has no learning rate; leave it out"
            )
    for holder in {
        id(scheduler): scheduler for scheduler in [*all_schedulers, *inner_schedulers]
    }.values():
        for name in ("base_lrs", "_last_lr"):
            if hasattr(holder, name):
                setattr(holder, name, [rate * factor for rate in getattr(holder, name)])
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    tensors = {id(rate): rate for group in groups if isinstance(rate := group["lr"], Tensor)}
    for rate in tensors.values():  # once, also if groups share it
        rate.mul_(factor)  # in place: compiled steps refer to it
    for group in groups:
        if "initial_lr" in group:
            group["initial_lr"] = group["initial_lr"] * factor
        if not isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"] * factor


def _inner(scheduler: AnyScheduler) -> list[Any]:
    """Return the schedulers of a chain; of any other, the scheduler itself."""
    if isinstance(scheduler, schedulers.SequentialLR | schedulers.ChainedScheduler):
        return [inner for part in scheduler._schedulers for inner in _inner(part)]
    return [scheduler]


def _check(scheduler: Any) -> None:
    name = type(scheduler).__name__
    if type(scheduler) not in _RELATIVE:
        raise ConfigError(
            f"--scale-lr cannot scale the rates of {name}: they are not multiples of the "
            "optimizer's; scale them in the script, and leave --scale-lr out"
        )
    floors = [getattr(scheduler, floor, 0.0) for floor in _FLOORS]
    if any(any(floor) if isinstance(floor, list | tuple) else floor for floor in floors):
        raise ConfigError(
            f"--scale-lr: {name} has a minimum rate, which would not be scaled; scale the rates in "
            "the script, or leave the minimum out"
        )


class Warmup(schedulers.LambdaLR):
    """Raises the rate to its value in ``num_steps`` steps of the optimizer, from ``start`` of it.

    It is stepped after the optimizer automatically, and keeps the rate afterwards.
    """

    def __init__(self, optimizer: Optimizer, num_steps: int, start: float) -> None:
        forget_first_rates(optimizer)
        super().__init__(optimizer, partial(ramp, num_steps=num_steps, start=start))

    def step(self, epoch: int | None = None) -> None:
        """Set the next rate; raises ConfigError if something else has changed the rate."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        last_rates = [float(rate) for rate in getattr(self, "_last_lr", rates)]
        if rates != last_rates:
            raise ConfigError(
                f"--warmup sets the learning rate of each update ({last_rates[0]:g} now), but the "
                f"script has set it to {rates[0]:g}: leave --warmup out and warm up in the script, "
                "or do not change the rate in the script"
            )
        super().step()

    @property
    def is_over(self) -> bool:
        """Whether the rate has reached its value."""
        function: Any = self.lr_lambdas[0]
        return bool(self.last_epoch >= function.keywords["num_steps"])


def forget_first_rates(optimizer: Optimizer) -> None:
    """Make new schedulers start from the optimizer's current rates.

    Otherwise they start from the initial rates of an earlier scheduler, or of a loaded state.
    """
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)


class StepsOnEach:
    """Checks that a loop steps on every batch, which a warm-up in epochs relies on.

    Args:
        length: the length of the warm-up, as the user wrote it.
        parameters: whose gradients are checked.
        batch: returns the loop's current batch, a new object each time; None outside the loop.
    """

    def __init__(
        self,
        warmup: Warmup,
        length: str,
        parameters: Iterable[nn.Parameter],
        batch: Callable[[], object],
    ) -> None:
        self._warmup, self._length = warmup, length
        self._parameters, self._batch = list(parameters), batch
        self._last: object = None
        """The batch of the last backward pass."""
        self._num_steps = 0
        """Steps before that pass."""

    def differentiated(self) -> None:
        """Note the start of a backward pass.

        Raises:
            ConfigError: it adds to the gradient of another batch, without a step in between.
        """
        batch, num_steps = self._batch(), self._warmup.last_epoch
        if batch is None or self._warmup.is_over:
            self._last = None
            return
        is_another = self._last is not None and self._last is not batch
        if is_another and num_steps == self._num_steps:
            self._refuse_gradients()
        self._last, self._num_steps = batch, num_steps

    def _refuse_gradients(self) -> None:
        grads = [parameter.grad for parameter in self._parameters]
        if any(grad is not None and bool(grad.any()) for grad in grads):
            raise ConfigError(
                f"--warmup {self._length}: this script does not step its optimizer on every batch, "
                "so the number of updates of an epoch is unknown; give updates, --warmup 200, or "
                "accumulate with --accumulate N"
            )


def ramp(step: int, *, num_steps: int, start: float) -> float:
    """Return the share of the rate at a step, counted from 0."""
    return start + (1.0 - start) * min(1.0, step / num_steps)


def make_warmup(
    context: Context,
    optimizers: Sequence[Optimizer],
    prepared: Sequence[AnyScheduler],
    factor: float,
    num_an_epoch: Callable[[], int | None],
) -> Warmup | None:
    """Return the warm-up that the user wants; None: none.

    Args:
        prepared: the script's own schedulers.
        factor: the scaling factor of the rates.
        num_an_epoch: returns the optimizer's steps in a pass over the data; None: unknown.

    Raises:
        ConfigError: it conflicts with the script's optimizers or schedulers.
    """
    length = read_length(context.warmup)
    if length is None:
        return None
    if len(optimizers) > 1:
        raise ConfigError(
            f"--warmup is for one optimizer, but the script has {len(optimizers)}: warm up in the "
            "script"
        )
    if prepared:
        raise ConfigError(
            f"--warmup sets the learning rate of each update, and so does "
            f"{type(prepared[0]).__name__}: leave --warmup out, and combine them in the script: "
            "SequentialLR(optimizer, [LinearLR(...), scheduler], milestones=[...])"
        )
    if any("lr" not in group for group in optimizers[0].param_groups):
        raise ConfigError(
            f"--warmup: {type(optimizers[0]).__name__} has no learning rate; leave it out"
        )
    num_steps = _steps(length, context, num_an_epoch)
    return Warmup(optimizers[0], num_steps, 1.0 / factor if factor > 1.0 else 1.0 / num_steps)


def _steps(length: Length, context: Context, num_an_epoch: Callable[[], int | None]) -> int:
    """Return the warm-up in optimizer steps; under local-sgd an update has several."""
    if length.updates:
        if context.is_adaptive and context.is_difference:
            raise ConfigError(
                f"--warmup {length.updates}: under {context.protocol} the steps of an update "
                "change during the run; give epochs, --warmup 5ep"
            )
        return length.updates * context.num_steps
    num_steps = num_an_epoch()
    if num_steps is None:
        raise ConfigError(
            f"--warmup {length.epochs:g}ep: the number of updates of an epoch is unknown in this "
            "script (a stream, or numbers of pace.updates); give updates, --warmup 200"
        )
    return max(1, round(length.epochs * num_steps))


def note_of_warmup(warmup: Warmup, context: Context) -> str:
    """Return the note on the warm-up for the plan."""
    rate = float(warmup.base_lrs[0])
    function: Any = warmup.lr_lambdas[0]
    num_steps, start = function.keywords["num_steps"], function.keywords["start"]
    unit = "steps" if context.num_steps > 1 else "updates"
    return (
        f"learning rate from {start * rate:g} to {rate:g} over the first {num_steps:,} {unit} "
        f"(--warmup {context.warmup})"
    )
