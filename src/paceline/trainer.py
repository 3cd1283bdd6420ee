"""The standard loop, which uses ``script/worker.py`` like any user's.

This module must not know engines.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .context import Context
from .data.arrays import ArrayDataset, collate_batch
from .errors import ConfigError
from .replica.seeding import seed_all
from .script.worker import Pace, current_pace
from .tuning.candidate import LossForward
from .workloads import load_task
from .workloads.base import Task

_EVALUATION_BATCH = 1000


def train_here(spec: str | Task, context: Context) -> None:
    """One worker's part in the training of a task."""
    pace = current_pace()
    task = load_task(spec, pace.num_workers, context.init) if isinstance(spec, str) else spec
    splits = task.splits()
    seed_all(context.seed)
    model = task.module().to(pace.device)
    optimizer = task.optimizer(model.parameters(), context.lr or task.learning_rate)
    batch_size = context.batch_size or task.batch_size
    if context.mini_batch_size is not None:
        batch_size = context.mini_batch_size * context.parts
    loader = make_loader(splits.train, batch_size, is_shuffled=True)
    pace.describe(
        task=task.name, source=splits.source, notes=task.notes, epochs=task.epochs,
        own_batch_size=task.batch_size,
    )  # fmt: skip

    forward = LossForward(task.loss)
    model, optimizer, loader = pace.prepare(model, optimizer, loader, forward=forward)
    autocast = pace.autocast if context.precision else nullcontext
    for _ in pace.epochs(task.epochs):
        for batch in loader:
            pair = pair_of(task, batch)
            with pace.step():
                optimizer.zero_grad()
                with autocast():
                    loss = forward(model, pair)
                pace.backward(loss)
                optimizer.step()
        if splits.test is None:
            continue
        with autocast():
            evaluate(pace, model, task, splits.test)
    pace.save("model.safetensors")


def evaluate(pace: Pace, model: torch.nn.Module, task: Task, test: Any) -> None:
    """Exact metrics of the whole test set, for the run's log and its best parameters."""

    def measure(batch: tuple[Tensor, Tensor]) -> dict[str, tuple[float, float]]:
        inputs, targets = pair_of(task, batch)
        return task.metrics(model(inputs), targets)

    pace.evaluate(measure, make_loader(test, _EVALUATION_BATCH))


def pair_of(task: Task, batch: Any) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a batch.

    Raises:
        ConfigError: a sample is not such a pair.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    kind = f"{len(batch)} parts" if isinstance(batch, list | tuple) else type(batch).__name__
    raise ConfigError(
        f"task {task.name}: a sample of its data must be a pair (inputs, targets), got {kind}; for "
        "other batches write a loop of your own, and start it with paceline launch"
    )


def make_loader(dataset: Any, batch_size: int, *, is_shuffled: bool = False) -> DataLoader[Any]:
    """A loader; an ``ArrayDataset`` gathers whole batches itself."""
    collate = collate_batch if isinstance(dataset, ArrayDataset) else None
    return DataLoader(dataset, batch_size=batch_size, shuffle=is_shuffled, collate_fn=collate)
