"""Real training of a task at one batch size: gradient noise, speed and accuracy.

    task, batch size, learning rate -> timed updates -> test accuracy about four times an epoch

Only updates are timed; evaluations are not. The noise tells from which batch size on a larger batch
saves fewer updates than in proportion: the gradient of B samples is G plus noise of variance
tr(Sigma) / B, so

    E|G_B|^2 = |G|^2 + S / B,   S = tr(Sigma)         two batch sizes give both unknowns:

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)         unbiased
    S     = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)         unbiased
    B_simple = S / |G|^2                              at this batch, half of |G_B|^2 is noise

A draw takes B = b 2^n samples in pieces of b and averages their gradients one after another, so the
same work also measures all batch sizes in between. This module must not know why a batch size was
chosen.

Source: S. McCandlish, J. Kaplan, D. Amodei and the OpenAI Dota team, "An Empirical Model of
Large-Batch Training", 2018 (arXiv:1812.06162), section 2.2 and appendix A.1; the learning rate:
eq. 2.6. Changed: the large batch is the mean of the small ones, not of other samples.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.stats import accuracy_in
from ..data.arrays import Splits
from ..data.feed import fetch
from ..errors import ConfigError
from ..trainer import make_loader
from ..workloads.base import Task
from .clock import elapsed_s

_EVALUATIONS_AN_EPOCH = 4
_EVALUATION_BATCH = 1000
MOST_S = 60.0
"""A training gives up after this time."""
_SMALL, _DOUBLINGS = 16, 5
"""Noise is measured with batches of 16 to 512 samples."""
_RESAMPLES = 500

Gradient = Callable[[int], Tensor]
"""A number of newly drawn samples -> the mean of their gradients, as a flat tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The gradient noise at one point of the training.

    Args:
        squared: batch size, from b to B -> mean of |G_batch|^2 over the draws.
        signal: |G|^2, unbiased; <= 0 if the noise hides it.
        trace: S = tr(Sigma), unbiased.
        interval: 95 % interval of B_simple, by bootstrap over the draws; ends may be infinite.
        draws: number of draws.
    """

    squared: dict[int, float]
    signal: float
    trace: float
    interval: tuple[float, float]
    draws: int

    @property
    def scale(self) -> float:
        """B_simple, in samples; infinite if the noise hides the gradient."""
        return scale_of(self.signal, self.trace)

    def share(self, batch_size: float) -> float:
        """Return the predicted share of noise in |G_B|^2: 1 / (1 + B / B_simple)."""
        if self.scale == float("inf"):
            return 1.0
        return self.scale / (self.scale + batch_size)

    def measured_share(self, batch_size: int) -> float:
        """Return the measured share of noise in |G_B|^2; 0 if that is zero."""
        squared = self.squared[batch_size]
        return 1.0 - max(0.0, self.signal) / squared if squared else 0.0


def unbiased(small: int, small_squared: float, big: int, big_squared: float) -> tuple[float, float]:
    """Return |G|^2 and S from the mean squares at two batch sizes.

    Example:
        >>> unbiased(1, 3.0 + 8.0 / 1, 4, 3.0 + 8.0 / 4)
        (3.0, 8.0)
    """
    signal = (big * big_squared - small * small_squared) / (big - small)
    trace = (small_squared - big_squared) / (1.0 / small - 1.0 / big)
    return signal, trace


def scale_of(signal: float, trace: float) -> float:
    """Return S / |G|^2; 0 if S is not positive, infinite if only |G|^2 is not."""
    if trace <= 0:
        return 0.0
    return trace / signal if signal > 0 else float("inf")


def scaled_rate(rate: float, batch_size: int, other: int, scale: float) -> float:
    """Return the learning rate for a batch of ``other`` samples.

    eps(B) = eps_max / (1 + B_simple / B), with ``rate`` at ``batch_size``: proportional to B well
    below the noise scale, constant well above it.
    """
    if scale == float("inf"):
        return rate * other / batch_size
    return rate * (1.0 + scale / batch_size) / (1.0 + scale / other)


def measure_noise(gradient: Gradient, small: int, doublings: int, draws: int) -> Noise:
    """Draw gradients and return the noise in them.

    Args:
        small: b, >= 1.
        doublings: n, >= 1.
        draws: >= 2.
    """
    sizes = [small * 2**n for n in range(doublings + 1)]
    squares = [_draw(gradient, small, doublings) for _ in range(draws)]
    squared = {size: sum(draw[i] for draw in squares) / draws for i, size in enumerate(sizes)}
    signal, trace = unbiased(small, squared[small], sizes[-1], squared[sizes[-1]])
    interval = _interval([(draw[0], draw[-1]) for draw in squares], small, sizes[-1])
    return Noise(squared=squared, signal=signal, trace=trace, interval=interval, draws=draws)


def _draw(gradient: Gradient, small: int, doublings: int) -> list[float]:
    """Return |G_batch|^2 of one draw at each batch size; at the smallest, their mean."""
    count = 2**doublings
    total = gradient(small).clone()
    smalls, squares = [_squared(total)], []
    for number in range(2, count + 1):
        piece = gradient(small)
        smalls.append(_squared(piece))
        total += piece
        if number & (number - 1) == 0:
            squares.append(_squared(total) / number**2)
    return [sum(smalls) / count, *squares]


def _squared(values: Tensor) -> float:
    return float(values.double().square().sum())


def _interval(pairs: Sequence[tuple[float, float]], small: int, big: int) -> tuple[float, float]:
    """Return the bootstrapped 95 % interval of B_simple, from squares at two batch sizes."""
    rng = random.Random(0)
    scales = []
    for _ in range(_RESAMPLES):
        chosen = rng.choices(pairs, k=len(pairs))
        means = [sum(pair[i] for pair in chosen) / len(chosen) for i in (0, 1)]
        scales.append(scale_of(*unbiased(small, means[0], big, means[1])))
    scales.sort()
    return scales[_RESAMPLES // 40], scales[-1 - _RESAMPLES // 40]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The result of one training.

    Args:
        samples_per_s: median of the updates.
        accuracy: on the test data, at the end.
        updates: until the target was reached or the training gave up.
        seconds: of updates until the target; None: not reached.
    """

    samples_per_s: float
    accuracy: float
    updates: int
    seconds: float | None


class TrainingRun:
    """A training of a task on one device.

    Args:
        splits: the task's data.
        device: torch's name of it.
        batch_size: samples an update averages.
        learning_rate: of the task's optimizer.
        seed: of the initial weights and the sample order.
    """

    def __init__(
        self,
        task: Task,
        splits: Splits,
        device: str,
        batch_size: int,
        learning_rate: float,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self._task, self._splits = task, splits
        self._device = torch.device(device)
        self.batch_size = batch_size
        self.samples = 0
        """Samples in all updates so far; the last batch of an epoch may be smaller."""
        self._loader = make_loader(splits.train, batch_size, is_shuffled=True)
        self._model = task.module().to(self._device).train()
        self._optimizer = task.optimizer(self._model.parameters(), learning_rate)
        self._batches = self._endless()

    def update(self) -> None:
        """Make one update."""
        inputs, targets = next(self._batches)
        self._backward(inputs, targets)
        self._optimizer.step()
        self.samples += len(targets)

    def gradient(self, count: int) -> Tensor:
        """Return the mean gradient of ``count`` samples drawn with replacement, without a step."""
        data = self._splits.train
        index = torch.randint(len(data), (count,)).tolist()  # type: ignore[arg-type]  # a map-style data set has a length
        self._backward(*self._loader.collate_fn(fetch(data, index)))
        grads = [
            parameter.grad for parameter in self._model.parameters() if parameter.grad is not None
        ]
        return nn.utils.parameters_to_vector(grads)

    def accuracy(self) -> float:
        """Return the accuracy on the test data.

        Raises:
            ConfigError: the task has no test data, or measures no accuracy.
        """
        if self._splits.test is None:
            raise ConfigError(f"{self._task.name} has no test data, so no accuracy to reach")
        right, count = 0.0, 0.0
        self._model.eval()
        with torch.no_grad():
            for inputs, targets in make_loader(self._splits.test, _EVALUATION_BATCH):
                outputs = self._model(inputs.to(self._device))
                metrics = self._task.metrics(outputs, targets.to(self._device))
                batch = accuracy_in(metrics)
                if batch is None:
                    raise ConfigError(
                        f"{self._task.name} has no accuracy to reach: it measures "
                        f"{', '.join(metrics)}; name one acc, accuracy or ..._acc"
                    )
                right, count = right + batch[0], count + batch[1]
        self._model.train()
        if not count:
            raise ConfigError(f"the test data of {self._task.name} has no samples to count")
        return right / count

    def _backward(self, inputs: Tensor, targets: Tensor) -> None:
        self._optimizer.zero_grad()
        outputs = self._model(inputs.to(self._device))
        self._task.loss(outputs, targets.to(self._device)).backward()

    def _endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self._loader


def noise_of(task: Task, splits: Splits, device: str, *, after: int, draws: int) -> Noise:
    """Return a task's gradient noise after ``after`` updates with its own batch and rate."""
    training = TrainingRun(task, splits, device, task.batch_size, task.learning_rate, seed=0)
    for _ in range(after):
        training.update()
    return measure_noise(training.gradient, _SMALL, _DOUBLINGS, draws)


def train_to(training: TrainingRun, target: float, num_samples: int, epochs: int) -> Reached:
    """Train until the test accuracy is ``target``, for at most ``epochs`` and about `MOST_S`."""
    epoch_updates = math.ceil(num_samples / training.batch_size)
    stride = max(1, epoch_updates // _EVALUATIONS_AN_EPOCH)
    update_s, per_s = list[float](), list[float]()
    accuracy, is_reached = 0.0, False
    while not is_reached and len(update_s) < epochs * epoch_updates and sum(update_s) < MOST_S:
        for _ in range(stride):
            before = training.samples
            update_s.append(elapsed_s(training.update))
            per_s.append((training.samples - before) / update_s[-1])
        accuracy = training.accuracy()
        is_reached = accuracy >= target
    return Reached(
        samples_per_s=statistics.median(per_s),
        accuracy=accuracy,
        updates=len(update_s),
        seconds=sum(update_s) if is_reached else None,
    )
