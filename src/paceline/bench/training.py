"""Real training of a task at one batch size: its gradient noise, its speed, and its accuracy.

    task, batch size, learning rate -> updates, timed -> test accuracy about four times an epoch

Only updates are timed; evaluations are not. Noise says from which batch size on a larger batch is
worth less than its samples: the gradient of B samples is G plus noise of variance tr(Sigma) / B, so

    E|G_B|^2 = |G|^2 + S / B,   S = tr(Sigma)         two batch sizes give both unknowns:

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)         unbiased
    S     = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)         unbiased
    B_simple = S / |G|^2                              there, half of a gradient's square is noise

A draw takes B = b 2^n samples in pieces of b, whose gradients are averaged one after the other, so
all batch sizes in between are measured with the same work. This module must not know why a batch
size was chosen.

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
"""A run that has trained this long gives up."""
_SMALL, _DOUBLINGS = 16, 5
"""Noise is measured with 16 to 512 samples."""
_RESAMPLES = 500

Gradient = Callable[[int], Tensor]
"""A number of fresh samples -> the mean of their gradients, flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The measurement at one point of the training.

    Args:
        squared: batch size, from b to B -> mean of |G_batch|^2 over the draws.
        signal: |G|^2, unbiased; not above 0 where the noise hides it.
        trace: S = tr(Sigma), unbiased.
        interval: 95 % of B_simple, by bootstrap over the draws; infinite ends are possible.
        draws: how many.
    """

    squared: dict[int, float]
    signal: float
    trace: float
    interval: tuple[float, float]
    draws: int

    @property
    def scale(self) -> float:
        """B_simple, in samples; infinite where the noise hides the gradient."""
        return scale_of(self.signal, self.trace)

    def share(self, batch_size: float) -> float:
        """Of the square of such a batch's gradient, how much is noise: 1 / (1 + B / B_simple)."""
        if self.scale == float("inf"):
            return 1.0
        return self.scale / (self.scale + batch_size)

    def measured_share(self, batch_size: int) -> float:
        """How much of a squared gradient is noise, from those of that size alone and |G|^2; 0 where
        they are zero."""
        squared = self.squared[batch_size]
        return 1.0 - max(0.0, self.signal) / squared if squared else 0.0


def unbiased(small: int, small_squared: float, big: int, big_squared: float) -> tuple[float, float]:
    """|G|^2 and S from mean squares at two batch sizes.

    Example:
        >>> unbiased(1, 3.0 + 8.0 / 1, 4, 3.0 + 8.0 / 4)
        (3.0, 8.0)
    """
    signal = (big * big_squared - small * small_squared) / (big - small)
    trace = (small_squared - big_squared) / (1.0 / small - 1.0 / big)
    return signal, trace


def scale_of(signal: float, trace: float) -> float:
    """S / |G|^2; 0 where no noise was seen, infinite where no gradient was."""
    if trace <= 0:
        return 0.0
    return trace / signal if signal > 0 else float("inf")


def scaled_rate(rate: float, batch_size: int, other: int, scale: float) -> float:
    """The learning rate for ``other`` samples: in proportion below the noise scale, flat above it.

    eps(B) = eps_max / (1 + B_simple / B), through ``rate`` at ``batch_size``.
    """
    if scale == float("inf"):
        return rate * other / batch_size
    return rate * (1.0 + scale / batch_size) / (1.0 + scale / other)


def measure_noise(gradient: Gradient, small: int, doublings: int, draws: int) -> Noise:
    """Draw gradients and separate the noise from the mean.

    Args:
        small: b, >= 1.
        doublings: n, >= 1.
        draws: >= 2.
    """
    sizes = [small * 2**n for n in range(doublings + 1)]
    found = [_draw(gradient, small, doublings) for _ in range(draws)]
    squared = {size: sum(one[i] for one in found) / draws for i, size in enumerate(sizes)}
    signal, trace = unbiased(small, squared[small], sizes[-1], squared[sizes[-1]])
    interval = _interval([(one[0], one[-1]) for one in found], small, sizes[-1])
    return Noise(squared=squared, signal=signal, trace=trace, interval=interval, draws=draws)


def _draw(gradient: Gradient, small: int, doublings: int) -> list[float]:
    """|G|^2 of one draw at each batch size; at the smallest the mean over all pieces."""
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
    rng = random.Random(0)
    scales = []
    for _ in range(_RESAMPLES):
        chosen = rng.choices(pairs, k=len(pairs))
        means = [sum(one[i] for one in chosen) / len(chosen) for i in (0, 1)]
        scales.append(scale_of(*unbiased(small, means[0], big, means[1])))
    scales.sort()
    return scales[_RESAMPLES // 40], scales[-1 - _RESAMPLES // 40]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """One training.

    Args:
        samples_per_s: by the median of the updates.
        accuracy: the last one on the test data.
        updates: until the target, or until it was given up.
        seconds: of training until the target; None: not reached.
    """

    samples_per_s: float
    accuracy: float
    updates: int
    seconds: float | None


class TrainingRun:
    """A task's model with its data, on one device.

    Args:
        task: what is trained.
        device: as torch writes it.
        batch_size: samples an update averages.
        learning_rate: of the task's optimizer.
        seed: of the first weights and of the order.
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
        """Of all updates so far: the last batch of an epoch may have fewer."""
        self._loader = make_loader(splits.train, batch_size, is_shuffled=True)
        self._model = task.model().to(self._device).train()
        self._optimizer = task.optimizer(self._model.parameters(), learning_rate)
        self._batches = self._endless()

    def update(self) -> None:
        """One step of the optimizer."""
        inputs, targets = next(self._batches)
        self._backward(inputs, targets)
        self._optimizer.step()
        self.samples += len(targets)

    def gradient(self, count: int) -> Tensor:
        """The mean gradient of ``count`` samples drawn with replacement; parameters stay."""
        data = self._splits.train
        index = torch.randint(len(data), (count,)).tolist()  # type: ignore[arg-type]  # a map-style data set has a length
        self._backward(*self._loader.collate_fn(fetch(data, index)))
        found = [
            parameter.grad for parameter in self._model.parameters() if parameter.grad is not None
        ]
        return nn.utils.parameters_to_vector(found)

    def accuracy(self) -> float:
        """Accuracy on the test data.

        Raises:
            ConfigError: the task has none, or no accuracy.
        """
        if self._splits.test is None:
            raise ConfigError(f"{self._task.name} has no test data, so no accuracy to reach")
        right, count = 0.0, 0.0
        self._model.eval()
        with torch.no_grad():
            for inputs, targets in make_loader(self._splits.test, _EVALUATION_BATCH):
                outputs = self._model(inputs.to(self._device))
                result = self._task.metrics(outputs, targets.to(self._device))
                its = accuracy_in(result)
                if its is None:
                    raise ConfigError(
                        f"{self._task.name} has no accuracy to reach: it measures "
                        f"{', '.join(result)}; name one acc, accuracy or ..._acc"
                    )
                right, count = right + its[0], count + its[1]
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
    """The gradient noise of a task once it has made ``after`` updates as its recipe says."""
    training = TrainingRun(task, splits, device, task.batch_size, task.learning_rate, seed=0)
    for _ in range(after):
        training.update()
    return measure_noise(training.gradient, _SMALL, _DOUBLINGS, draws)


def train_to(training: TrainingRun, target: float, num_samples: int, epochs: int) -> Reached:
    """Train until the test accuracy is ``target``; at most ``epochs``, and about `MOST_S`."""
    an_epoch = math.ceil(num_samples / training.batch_size)
    stride = max(1, an_epoch // _EVALUATIONS_AN_EPOCH)
    update_s, per_s = list[float](), list[float]()
    accuracy, is_reached = 0.0, False
    while not is_reached and len(update_s) < epochs * an_epoch and sum(update_s) < MOST_S:
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
