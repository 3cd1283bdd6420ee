"""Training in plain PyTorch: whole batches, one process, in the order that a run's seed draws.

    w_{v+1} = optimizer(w_v, grad of the mean loss over batch v)

Runs of several workers are compared with it, here and in tests/support/reference.py. It must not
use sessions, stores or engines.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoints.state import tensors_of
from ..data.feed import fetch
from ..data.loader import LeasedLoader
from ..events import Lease
from ..replica.seeding import seed_all
from ..trainer import make_loader, pair_of
from ..workloads.base import Task

State = dict[str, Tensor]


class PlainRun(NamedTuple):
    """The final state, and the loss of each update before it was made."""

    state: State
    losses: list[float]


class Order:
    """The order of the samples of each epoch, as the run's seed draws it."""

    def __init__(self, task: Task, seed: int = 0) -> None:
        self._task, self.dataset = task, task.data().train
        self._loader = make_loader(self.dataset, task.batch_size, is_shuffled=True)
        self._leased = LeasedLoader(self._loader, seed, torch.device("cpu"))

    def batch(self, lease: Lease) -> tuple[Tensor, Tensor]:
        """The samples at the positions of a lease."""
        self._leased.order.draw(lease.epoch)
        indices = list(self._leased.order.indices)[lease.start : lease.stop]
        return pair_of(self._task, self._loader.collate_fn(fetch(self.dataset, indices)))


def fresh(task: Task, learning_rate: float | None = None) -> tuple[nn.Module, Optimizer]:
    """The model that every worker starts with, and its optimizer."""
    seed_all(0)
    model = task.module()
    return model, task.optimizer(model.parameters(), learning_rate or task.learning_rate)


def plain_loop(task: Task, *, batch_size: int | None = None, lr: float | None = None) -> State:
    """The final state of one process with whole batches; the last batch may be shorter."""
    return plain_run(task, batch_size=batch_size, lr=lr).state


def plain_run(task: Task, *, batch_size: int | None = None, lr: float | None = None) -> PlainRun:
    """The final state, and the losses, of one process with whole batches."""
    model, optimizer = fresh(task, lr)
    order, losses = Order(task), []
    num_samples = len(order.dataset)  # type: ignore[arg-type]  # a map-style data set has a length
    for epoch in range(task.epochs):
        for lease in _batches(num_samples, batch_size or task.batch_size, epoch):
            inputs, targets = order.batch(lease)
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return PlainRun(state_of(model), losses)


def _batches(num_samples: int, batch_size: int, epoch: int) -> Iterator[Lease]:
    for start in range(0, num_samples, batch_size):
        yield Lease(0, epoch, start, min(start + batch_size, num_samples))


def state_of(model: nn.Module) -> State:
    """Clones of all parameters and buffers."""
    return {name: value.detach().clone() for name, value in tensors_of(model).items()}


def differ(one: State, other: State) -> float:
    """The largest difference of any element; the names must be the same."""
    return largest_difference(one, other)[1]


def largest_difference(one: State, other: State) -> tuple[str, float]:
    """The name and size of the largest difference; values not finite in only one differ."""
    assert one.keys() == other.keys()
    found = ("", 0.0)
    for name, value in one.items():
        most = _most(value, other[name])
        if most > found[1]:
            found = (name, most)
    return found


def _most(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where one is nan, as two of those prove nothing."""
    is_same = one == other  # else inf - inf, as in a causal mask, would be nan
    gap = ~is_same if one.dtype == torch.bool else (one - other).abs().masked_fill(is_same, 0)
    most = float(gap.max()) if gap.numel() else 0.0
    return math.inf if math.isnan(most) else most
