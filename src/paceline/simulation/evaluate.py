"""What a model makes of data, in one process: exact metrics, batch by batch.

This module must not know versions, members or time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..data.feed import fetch
from ..trainer import make_loader
from ..wire.messages import Totals
from ..workloads.base import Task

_BATCH = 1000


def examine(task: Task, model: nn.Module, data: Any) -> Totals:
    """The sums of the task's metrics over all of the data; empty where there is none.

    Args:
        data: map-style, or None.
    """
    totals: Totals = {}
    if data is None:
        return totals
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for inputs, targets in _batches(data):
            for name, (value, count) in task.metrics(model(inputs), targets).items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + value, before[1] + count)
    model.train(was_training)
    return totals


def first_samples(data: Any, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the first ``count`` samples of map-style data, or of all."""
    return next(_batches(data, count))


def _batches(data: Any, size: int = _BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    collate: Callable[[Any], Any] = make_loader(data, size).collate_fn
    for start in range(0, len(data), size):
        inputs, targets = collate(fetch(data, list(range(start, min(start + size, len(data))))))
        yield inputs, targets
