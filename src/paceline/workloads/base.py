"""A task: the model, the data and the metrics of a training.

One value for a trainer, a simulator or a benchmark, with callables instead of objects, so that
every worker creates its own model and opens its own data. It must not know how many workers there
are, nor which protocol joins them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..data.arrays import Splits
from ..errors import ConfigError, unknown

__all__ = ["Metrics", "Splits", "Task", "classification_metrics", "loss_metrics", "sgd"]

Metrics: TypeAlias = Callable[[Tensor, Tensor], dict[str, tuple[float, float]]]


def sgd(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    """Plain stochastic gradient descent, as the book and the papers use it."""
    return SGD(parameters, lr=learning_rate)


def classification_metrics(outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, float]]:
    """Accuracy and cross entropy of logits (B, classes) and labels (B), as sums with counts."""
    count = float(len(targets))
    correct = (outputs.argmax(dim=1) == targets).sum().item()
    loss = nn.functional.cross_entropy(outputs, targets, reduction="sum").item()
    return {"acc": (float(correct), count), "loss": (loss, count)}


def loss_metrics(loss: Callable[[Tensor, Tensor], Tensor]) -> Metrics:
    """Return the metrics of a task with nothing but a loss, which is a mean over the batch."""

    def metrics(outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, float]]:
        count = float(len(targets))
        return {"loss": (loss(outputs, targets).item() * count, count)}

    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything a run needs to know besides its workers.

    Args:
        name: shown in the plan and the report.
        model: creates a new module, initialised by torch's default generator.
        loss: (outputs, targets) -> the mean over the batch.
        data: opens the samples; called in every worker, and never fetches.
        learning_rate: per update of ``batch_size`` samples, > 0.
        batch_size: samples an update averages, >= 1.
        epochs: passes over the training samples, >= 1.
        metrics: (outputs, targets) -> {name: (sum, count)}; the accuracy is called
            "acc", "accuracy", or ends in one of them.
        optimizer: (parameters, learning rate) -> any ``torch.optim`` optimizer.
        notes: lines that the plan shows.

    Raises:
        ConfigError: a number is out of its range, or something is not callable.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[], Splits]
    learning_rate: float
    batch_size: int
    epochs: int
    metrics: Metrics
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer] = sgd
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("model", "loss", "data", "metrics", "optimizer"):
            value = getattr(self, field)
            # A module is callable, too; but one object cannot be every worker's model.
            if not callable(value) or (field == "model" and isinstance(value, nn.Module)):
                raise ConfigError(
                    f"task {self.name}: {field} must be callable, got {type(value).__name__}; "
                    f"each worker creates its own, so pass the function, not its result"
                )
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(
                f"task {self.name}: learning_rate must be > 0, got {self.learning_rate}"
            )
        for field in ("batch_size", "epochs"):
            count = getattr(self, field)
            if not isinstance(count, Integral) or count < 1:  # also numpy's
                raise ConfigError(f"task {self.name}: {field} must be >= 1, got {count}")
            object.__setattr__(self, field, int(count))

    def splits(self) -> Splits:
        """Call ``data`` and check the result.

        Raises:
            ConfigError: it returns something else.
        """
        data = self.data()
        if all(hasattr(data, name) for name in ("train", "test", "source")):
            return data
        raise ConfigError(
            f"task {self.name}: data must return paceline.Splits(train=..., test=..., source='a "
            f"description'), got {type(data).__name__}; test may be None"
        )

    def module(self) -> nn.Module:
        """Call ``model`` and check the result.

        Raises:
            ConfigError: it returns something else.
        """
        model = self.model()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"task {self.name}: model must return an nn.Module, got {type(model).__name__}"
            )
        return model


def init_normal(model: nn.Module, *, zero_biases: bool, std: float = 0.01) -> nn.Module:
    """Draw all linear and convolution weights from N(0, std^2), as in the book's chapter."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=std)
            if zero_biases and module.bias is not None:
                torch.nn.init.zeros_(module.bias)
    return model


def chosen_init(task: str, init: str | None, known: tuple[str, ...]) -> str:
    """Return ``init`` if the task has it, or its first one for None.

    Raises:
        ConfigError: the task has no such initialisation.
    """
    if init is None:
        return known[0]
    if init not in known:
        raise unknown("initialisation", init, known, f"task {task}")
    return init
