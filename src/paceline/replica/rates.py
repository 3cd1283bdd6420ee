"""Learning rates of another batch: scaled by its samples, and reached after a warm-up.

    --scale-lr   linear  rate x samples an update averages / samples of the batch it was chosen for
                 sqrt    rate x the root of that
    --warmup W   update v at  start + (rate - start) v / W,  from W on at rate; start is the rate
                 before scaling, and where it was not raised rate / W

Rates are scaled once, in ``prepare``, in every parameter group and in what schedulers hold of them;
what holds a rate that cannot be scaled with them is refused. The warm-up is a scheduler like one
that a script prepares, stepped after each step of the optimizer, so it is kept in checkpoints and
is the same in all workers. It sets the rate itself: a script that changes it, too, is refused. So
is one that leaves batches without a step where the warm-up lasts epochs: nobody knows how many
steps those have. This module must not know runs.

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
"""Their rates are multiples of the first one, but for a floor."""
_FLOORS = ("eta_min", "min_lrs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateScaling:
    """What rates are multiplied with, and why.

    Args:
        kind: ``none``, ``linear`` or ``sqrt``.
        samples: that an update averages, >= 1.
        own: that the rate was chosen for, >= 1.
    """

    kind: str
    samples: int
    own: int

    @property
    def factor(self) -> float:
        """1 where nothing is scaled."""
        ratio = self.samples / self.own
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.kind]

    def note(self, rate: float, *, is_script: bool) -> str:
        """For the plan; ``rate``: of the first group, scaled."""
        return (
            f"learning rate {rate:g} = {rate / self.factor:g} x {self.factor:.4g} (--scale-lr "
            f"{self.kind}: an update averages {self.samples:,} samples, it was chosen for "
            f"{self.own:,})"
        ) + ("; a rate that the script sets in its loop is not scaled" if is_script else "")


def scale(optimizers: Sequence[Optimizer], every: Sequence[AnyScheduler], factor: float) -> None:
    """Multiply every rate.

    Args:
        every: scheduler that holds rates of them, whether it was prepared or not.

    Raises:
        ConfigError: an optimizer has none, or a scheduler's rates are no multiples of the first;
            nothing has been changed then.
    """
    parts = [inner for one in every for inner in _inner(one)]
    for one in parts:
        _check(one)
    for optimizer in optimizers:
        if any("lr" not in group for group in optimizer.param_groups):
            raise ConfigError(
                f"--scale-lr: {type(optimizer).__name__} has no learning rate; leave it out"
            )
    for one in {id(one): one for one in [*every, *parts]}.values():
        for name in ("base_lrs", "_last_lr"):
            if hasattr(one, name):
                setattr(one, name, [rate * factor for rate in getattr(one, name)])
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    tensors = {id(rate): rate for group in groups if isinstance(rate := group["lr"], Tensor)}
    for rate in tensors.values():  # one that all groups have, too
        rate.mul_(factor)  # compiled steps hold it
    for group in groups:
        if "initial_lr" in group:
            group["initial_lr"] = group["initial_lr"] * factor
        if not isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"] * factor


def _inner(one: AnyScheduler) -> list[Any]:
    """The schedulers that a chain is made of, or the one itself."""
    if isinstance(one, schedulers.SequentialLR | schedulers.ChainedScheduler):
        return [inner for part in one._schedulers for inner in _inner(part)]
    return [one]


def _check(one: Any) -> None:
    name = type(one).__name__
    if type(one) not in _RELATIVE:
        raise ConfigError(
            f"--scale-lr cannot scale what {name} holds: its rates are no multiples of the "
            "optimizer's; scale them in the script, and leave it out"
        )
    floors = [getattr(one, floor, 0.0) for floor in _FLOORS]
    if any(any(floor) if isinstance(floor, list | tuple) else floor for floor in floors):
        raise ConfigError(
            f"--scale-lr: {name} has a least rate, which would stay as it is; scale the rates in "
            "the script, or leave the floor out"
        )


class Warmup(schedulers.LambdaLR):
    """The rate grows to its value in ``num_steps`` steps of the optimizer, from ``start`` of it.

    It steps behind the optimizer by itself, and keeps the rate afterwards.
    """

    def __init__(self, optimizer: Optimizer, num_steps: int, start: float) -> None:
        forget_first_rates(optimizer)
        super().__init__(optimizer, partial(ramp, num_steps=num_steps, start=start))

    def step(self, epoch: int | None = None) -> None:
        """Raises ConfigError where the rate is not what it was set to."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        was = [float(rate) for rate in getattr(self, "_last_lr", rates)]
        if rates != was:
            raise ConfigError(
                f"--warmup sets the learning rate of each update ({was[0]:g} now), and the script "
                f"has set it to {rates[0]:g}: leave --warmup out and warm up in the script, or "
                "leave the rate alone"
            )
        super().step()

    @property
    def is_over(self) -> bool:
        """Whether the rate has grown to its value."""
        function: Any = self.lr_lambdas[0]
        return bool(self.last_epoch >= function.keywords["num_steps"])


def forget_first_rates(optimizer: Optimizer) -> None:
    """Schedulers made from now on multiply the rates that it has now.

    Else it would be those that an earlier one began with, as a loaded state has them, too.
    """
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)


class StepsOnEach:
    """Whether a loop steps on every batch, which the length of a warm-up in epochs counts on.

    Args:
        asked: the length, as it was given.
        parameters: whose gradients are looked at.
        batch: what is in the loop's hands now, another object for each batch; None outside of it.
    """

    def __init__(
        self,
        warmup: Warmup,
        asked: str,
        parameters: Iterable[nn.Parameter],
        batch: Callable[[], object],
    ) -> None:
        self._warmup, self._asked = warmup, asked
        self._parameters, self._batch = list(parameters), batch
        self._last: object = None
        """The batch of the last backward pass."""
        self._num_steps = 0
        """That were made before it."""

    def differentiated(self) -> None:
        """A backward pass begins.

        Raises:
            ConfigError: it adds to a gradient of another batch, which had no step.
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
        if any(one.grad is not None and bool(one.grad.any()) for one in self._parameters):
            raise ConfigError(
                f"--warmup {self._asked}: this script does not step its optimizer on every batch, "
                "so nobody knows how many updates an epoch has; give updates, --warmup 200, or "
                "leave accumulating to --accumulate N"
            )


def ramp(step: int, *, num_steps: int, start: float) -> float:
    """The share of the rate at a step, counted from 0."""
    return start + (1.0 - start) * min(1.0, step / num_steps)


def make_warmup(
    context: Context,
    optimizers: Sequence[Optimizer],
    prepared: Sequence[AnyScheduler],
    factor: float,
    num_an_epoch: Callable[[], int | None],
) -> Warmup | None:
    """The warm-up that is asked for; None: none is.

    Args:
        prepared: the script's own schedulers.
        factor: what rates were scaled with.
        num_an_epoch: steps of the optimizer in a pass over the data; None: nobody knows.

    Raises:
        ConfigError: it cannot be beside what the script has.
    """
    length = read_length(context.warmup)
    if length is None:
        return None
    if len(optimizers) > 1:
        raise ConfigError(
            f"--warmup is for one optimizer, the script has {len(optimizers)}: warm up in it"
        )
    if prepared:
        raise ConfigError(
            f"--warmup sets the learning rate of each update, and so does "
            f"{type(prepared[0]).__name__}: leave --warmup out, and in the script write "
            "SequentialLR(optimizer, [LinearLR(...), it], milestones=[...])"
        )
    if any("lr" not in group for group in optimizers[0].param_groups):
        raise ConfigError(
            f"--warmup: {type(optimizers[0]).__name__} has no learning rate; leave it out"
        )
    num_steps = _steps(length, context, num_an_epoch)
    return Warmup(optimizers[0], num_steps, 1.0 / factor if factor > 1.0 else 1.0 / num_steps)


def _steps(length: Length, context: Context, num_an_epoch: Callable[[], int | None]) -> int:
    """Of the optimizer: under local-sgd an update has several."""
    if length.updates:
        if context.is_adaptive and context.is_difference:
            raise ConfigError(
                f"--warmup {length.updates}: under {context.protocol} the steps of an update "
                "change while the run goes; give epochs, --warmup 5ep"
            )
        return length.updates * context.num_steps
    number = num_an_epoch()
    if number is None:
        raise ConfigError(
            f"--warmup {length.epochs:g}ep: nobody knows how many updates an epoch of this script "
            "has (a stream, or numbers of pace.updates); give updates, --warmup 200"
        )
    return max(1, round(length.epochs * number))


def note_of_warmup(warmup: Warmup, context: Context) -> str:
    """For the plan."""
    rate = float(warmup.base_lrs[0])
    function: Any = warmup.lr_lambdas[0]
    num_steps, start = function.keywords["num_steps"], function.keywords["start"]
    what = "steps" if context.num_steps > 1 else "updates"
    return (
        f"learning rate from {start * rate:g} to {rate:g} over the first {num_steps:,} {what} "
        f"(--warmup {context.warmup})"
    )
