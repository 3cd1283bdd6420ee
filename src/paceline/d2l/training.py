"""Fashion-MNIST in loaders, a step by hand, the accuracy, and training over several workers."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..checkpoints.state import load_tensors
from ..data.arrays import collate_batch, load
from ..data.fetch import fetch
from ..errors import ConfigError
from ..launch.launcher import train as train_task
from ..report.summary import Summary
from ..workloads.base import Task, classification_metrics

Loader: TypeAlias = "DataLoader[tuple[Tensor, ...]]"

_DATA = "fashion-mnist"


def load_data_fashion_mnist(batch_size: int, resize: int | None = None) -> tuple[Loader, Loader]:
    """Return loaders of the training images, shuffled, and of the test images.

    A batch is images, float32 (B, 1, 28, 28) in [0, 1], and labels, int64 (B,). The data set is
    fetched if it is not on this machine; batches are gathered whole, so no loader processes are
    needed.

    Args:
        resize: height and width that each batch is scaled to.

    Raises:
        ConfigError: it could not be fetched, or a number is below 1.
    """
    for name, number in {"batch_size": batch_size, "resize": resize}.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name} must be >= 1, got {number}")
    fetch(_DATA)
    splits = load(_DATA)
    assert splits.test is not None  # of this data set
    collate = collate_batch if resize is None else partial(_collate_scaled, side_px=resize)
    return (
        DataLoader(splits.train, batch_size, shuffle=True, collate_fn=collate),
        DataLoader(splits.test, batch_size, collate_fn=collate),
    )


def _collate_scaled(samples: Any, side_px: int) -> tuple[Tensor, Tensor]:
    inputs, targets = collate_batch(samples)
    size = (side_px, side_px)
    return nn.functional.interpolate(inputs, size, mode="bilinear", antialias=True), targets


def sgd(params: Iterable[Tensor], lr: float, batch_size: int) -> None:
    """Step each parameter by its gradient, a sum over ``batch_size`` samples, and clear that.

    Raises:
        ConfigError: no parameter has a gradient, as copies of parameters that were not detached.
    """
    trained = [param for param in params if param.is_leaf and param.grad is not None]
    if not trained:
        raise ConfigError(
            "no parameter has a gradient, so nothing would be trained; copies of parameters need "
            "p.detach().clone().requires_grad_(), and backward() comes before"
        )
    with torch.no_grad():
        for param in trained:
            assert param.grad is not None
            param -= lr * param.grad / batch_size
            param.grad.zero_()


def accuracy(y_hat: Tensor, y: Tensor) -> float:
    """Return how many predictions are right.

    Args:
        y_hat: (B, classes), the largest value of a row is the prediction; or (B,) classes.
        y: (B,) classes.
    """
    predicted = y_hat.argmax(dim=1) if y_hat.ndim > 1 and y_hat.shape[1] > 1 else y_hat
    return float((predicted.type(y.dtype) == y).sum())


def evaluate_accuracy_gpu(
    net: Callable[[Tensor], Tensor],
    data_iter: Iterable[tuple[Tensor, Tensor]],
    device: torch.device | str | None = None,
) -> float:
    """Return the share of right predictions, from 0 to 1.

    Args:
        net: a module, which is evaluated in evaluation mode and then has its mode again, or a
            function.
        device: where batches go; None: to the parameters of a module, and nowhere for a function.

    Raises:
        ConfigError: there are no samples.
    """
    if not isinstance(net, nn.Module):
        with torch.no_grad():
            return _share_right(net, data_iter, device)
    first = next(net.parameters(), None)
    device = first.device if device is None and first is not None else device
    with _evaluating(net):
        return _share_right(net, data_iter, device)


@contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    """In evaluation mode and without gradients; then each layer has its own mode again."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _share_right(
    net: Callable[[Tensor], Tensor],
    data_iter: Iterable[tuple[Tensor, Tensor]],
    device: torch.device | str | None,
) -> float:
    num_right, count = 0.0, 0
    for inputs, targets in data_iter:
        placed = (inputs, targets) if device is None else (inputs.to(device), targets.to(device))
        num_right += accuracy(net(placed[0]), placed[1])
        count += len(targets)
    if not count:
        raise ConfigError("there are no samples, so there is no accuracy")
    return num_right / count


def train(
    net: nn.Module,
    num_gpus: int,
    batch_size: int,
    lr: float,
    *,
    num_epochs: int = 10,
    **settings: Any,
) -> Summary:
    """Train ``net`` on Fashion-MNIST with plain SGD over ``num_gpus`` workers.

    The chapter's function of this name uses ``nn.DataParallel``; this one trains with a process for
    each worker; workers share the GPUs if there are fewer, and the CPU if there are none. The
    gradient is the mean over ``batch_size`` samples either way. It starts from the parameters of
    ``net``, which the chapter draws anew in each call (``net.apply(init_weights)``), and leaves the
    trained ones there.

    Args:
        num_gpus: number of workers, >= 1.
        batch_size: samples of an update, over all workers.
        settings: any other setting of `paceline.train` (``protocol="k-sync:1"``, ...).

    Raises:
        ConfigError: a setting is unknown or cannot work, or the data could not be fetched.
        WorkerError: a worker failed.
    """
    fetch(_DATA)
    if any(isinstance(param, nn.UninitializedParameter) for param in net.parameters()):
        with _evaluating(net):  # gives lazy layers their shapes
            net(load(_DATA).train[0][0].unsqueeze(0))
    task = Task(
        name=type(net).__name__.lower(),
        model=partial(_copy_to_train, net),
        loss=nn.functional.cross_entropy,
        data=partial(load, _DATA),
        learning_rate=lr,
        batch_size=batch_size,
        epochs=num_epochs,
        metrics=classification_metrics,
    )
    summary = train_task(task, workers=num_gpus, **settings)
    if summary is None:
        raise ConfigError("dry_run trains nothing; use paceline.train for it")
    net.load_state_dict(load_tensors(Path(summary.run_dir) / "model.safetensors"))
    return summary


def _copy_to_train(net: nn.Module) -> nn.Module:
    """Return a copy in training mode, as the chapter's function trains."""
    return copy.deepcopy(net).train()
