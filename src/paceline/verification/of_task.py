"""A task, run small: a few of its samples by plain PyTorch, and by several workers.

Each sample is drawn once, so its augmentation is the same in both. This module must not know why
a difference comes about.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from ..checkpoints.state import load_tensors
from ..data.arrays import Splits
from ..data.feed import apply
from ..errors import ConfigError
from ..program import TaskProgram
from ..replica.seeding import seed_all
from ..workloads.base import Task, sgd
from .cases import (
    UPDATES,
    Compared,
    Dtype,
    FirstUpdate,
    Verifiable,
    VerifyCase,
    cast,
    first_update,
    freeze,
    run_small,
)
from .layers import BreakingLayer, breaking_layers
from .plain import fresh, largest_difference, plain_run


class TaskSubject(Verifiable):
    """A task: its model, loss and optimizer, and its first samples.

    Raises:
        ConfigError: its data is a stream.
    """

    def __init__(self, task: Task) -> None:
        self.name = task.name
        self._task = task
        train: Any = task.splits().train
        if isinstance(train, IterableDataset):
            raise ConfigError(
                f"task {task.name}: verify takes samples by their number, but its data is a "
                "stream; give a map-style data set of a few samples"
            )
        self._data = train
        self._samples: list[Any] = []

    def compare(self, case: VerifyCase) -> Compared:
        task = self._small(case)
        state, losses = plain_run(task)
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            ran = run_small(TaskProgram(task=task), case.workers, Path(folder))
            name, difference = largest_difference(state, load_tensors(ran / "model.safetensors"))
            shared = first_update(ran)
        size, rest = task.batch_size, 2 * case.workers + (not case.is_even)
        alone = FirstUpdate(losses=(losses[0],), samples=(size,), weights=(1.0,))
        return Compared(
            sizes=(*[size] * (UPDATES - 1), rest),
            name=name, difference=difference, alone=alone, shared=shared,
        )  # fmt: skip

    def breaking_layers(self, case: VerifyCase) -> tuple[BreakingLayer, ...]:
        task = self._small(case)
        model, _ = fresh(task)
        inputs = torch.utils.data.default_collate(
            [sample[0] for sample in self._first(task.batch_size, case.dtype)]
        )
        return breaking_layers(model, [inputs], {}, case.workers)

    def _small(self, case: VerifyCase) -> Task:
        """The task on the samples of UPDATES updates, the last one short."""
        size, rest = case.batch_size(), 2 * case.workers + (not case.is_even)
        samples = self._first((UPDATES - 1) * size + rest, case.dtype)
        # Adam divides by a gradient's size, so in float32 it would turn rounding into steps.
        optimizer = self._task.optimizer if case.dtype == "float64" else sgd
        return replace(
            self._task,
            optimizer=optimizer,
            model=partial(_model, self._task, case.dtype, case.frozen),
            data=partial(_splits, samples),
            batch_size=size,
            epochs=1,
            notes=(),
        )

    def _first(self, count: int, dtype: Dtype) -> list[Any]:
        """The first samples; each is drawn once, so augmentation is the same in all runs.

        They are copied: a view of a data set's tensor would be pickled with all of it.
        """
        if len(self._data) < count:
            raise ConfigError(
                f"task {self.name}: verify needs {count} samples for that many workers, but its "
                f"data has {len(self._data)}; use fewer workers, -n 1,2"
            )
        while len(self._samples) < count:
            seed_all(len(self._samples))
            self._samples.append(apply(torch.clone, self._data[len(self._samples)]))
        return [apply(partial(cast, dtype), sample) for sample in self._samples[:count]]


class FewSamples(Dataset[Any]):
    """Samples in a list."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def _splits(samples: Sequence[Any]) -> Splits:
    return Splits(train=FewSamples(samples), source=f"{len(samples)} samples")


def _model(task: Task, dtype: Dtype, frozen: Sequence[str]) -> nn.Module:
    model = task.module().to(getattr(torch, dtype))
    freeze(model, frozen)
    return model
