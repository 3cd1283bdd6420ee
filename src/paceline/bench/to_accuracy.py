"""Real training of a task at one batch size: how fast it goes, and when it reaches an accuracy.

    task, batch size, learning rate -> updates, timed -> test accuracy about four times an epoch

Only updates are timed; evaluations are not. It must not know why a batch size was chosen.
"""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ..data.arrays import ArrayDataset, Splits, collate_batch
from ..errors import ConfigError
from ..trainer import make_loader
from ..workloads.base import Task
from .noise import Noise, measure_noise
from .waiting import synchronize

_EVALUATIONS_AN_EPOCH = 4
_EVALUATION_BATCH = 1000
MOST_S = 60.0
"""After so much training a run gives up."""
_SMALL, _DOUBLINGS = 16, 5
"""Noise is measured with 16 to 512 samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """One training.

    Args:
        samples_per_s: by the median of the updates.
        accuracy: the last one on the test data.
        updates: until the target, or until it was given up.
        seconds: of training until the target; None: not reached.
    """

    batch_size: int
    learning_rate: float
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
        self.batch_size, self.learning_rate = batch_size, learning_rate
        self._model = task.model().to(self._device).train()
        self._optimizer = task.optimizer(self._model.parameters(), learning_rate)
        self._batches = self._endless()

    def update(self) -> None:
        """One step of the optimizer."""
        self._backward(*next(self._batches))
        self._optimizer.step()

    def gradient(self, count: int) -> Tensor:
        """The mean gradient of so many samples, drawn with replacement; parameters stay."""
        data = self._splits.train
        index = torch.randint(len(data), (count,)).tolist()  # type: ignore[arg-type]
        if isinstance(data, ArrayDataset):
            inputs, targets = collate_batch(data.__getitems__(index))
        else:
            inputs, targets = default_collate([data[i] for i in index])
        self._backward(inputs, targets)
        found = [one.grad for one in self._model.parameters() if one.grad is not None]
        return nn.utils.parameters_to_vector(found)

    def accuracy(self) -> float:
        """On the test data.

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
                found = self._task.metrics(outputs, targets.to(self._device))
                if "acc" not in found:
                    raise ConfigError(f"{self._task.name} has no accuracy to reach")
                right, count = right + found["acc"][0], count + found["acc"][1]
        self._model.train()
        return right / count

    def _backward(self, inputs: Tensor, targets: Tensor) -> None:
        self._optimizer.zero_grad()
        outputs = self._model(inputs.to(self._device))
        self._task.loss(outputs, targets.to(self._device)).backward()  # type: ignore[no-untyped-call]

    def _endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from make_loader(self._splits.train, self.batch_size, is_shuffled=True)


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
    update_s: list[float] = []
    accuracy, is_reached = 0.0, False
    while not is_reached and len(update_s) < epochs * an_epoch and sum(update_s) < MOST_S:
        for _ in range(stride):
            start_s = time.perf_counter()
            training.update()
            synchronize()
            update_s.append(time.perf_counter() - start_s)
        accuracy = training.accuracy()
        is_reached = accuracy >= target
    return Reached(
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        samples_per_s=training.batch_size / statistics.median(update_s),
        accuracy=accuracy,
        updates=len(update_s),
        seconds=sum(update_s) if is_reached else None,
    )
