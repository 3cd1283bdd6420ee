"""A case of the table, its result, and how a program is run small.

Two rows of batches for each number of workers: even ones, which it divides, and uneven ones, whose
parts differ by a sample. A case can set layers aside, which then do nothing that depends on the
batch (``eval``). The inline engine runs all workers in this process, by the code of a live run.
This module must not know why a difference comes about.
"""

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..config import RunSettings
from ..events import Apply, Ticket
from ..launch.launcher import launch_run
from ..program import Program
from ..report.live import QuietObserver
from ..trace import FILE_NAME, read_trace
from ..trace.records import Handed, Ordered
from .layers import BreakingLayer

UPDATES = 3
EACH = 4
"""Samples of a worker's part, for a task."""
CLOSE = 1e-6
"""In float32, a larger difference is compared with that of rounding alone."""

Dtype = Literal["float64", "float32"]
DTYPES: tuple[Dtype, ...] = ("float64", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCase:
    """One row of the table.

    Args:
        workers: N >= 1.
        is_even: whether N divides the batch.
        frozen: names of layers that are set aside.
    """

    workers: int
    dtype: Dtype
    is_even: bool
    frozen: tuple[str, ...] = ()
    is_nudged: bool = False
    """Whether every weight starts one last bit nearer to 0."""

    def batch_size(self, own: int | None = None) -> int:
        """Samples that an update averages: a few for each worker, and one more if uneven.

        Args:
            own: the batch size of a script, which is not exceeded if possible.
        """
        each = EACH if own is None else max(1, min(2 * EACH, own // self.workers))
        size = self.workers * each
        if self.is_even or self.workers == 1:
            return size
        return size - 1 if own is not None and each > 1 else size + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstUpdate:
    """The first update of a run: its pushes.

    Attributes:
        losses: the loss of each worker's backward.
        samples: of each push.
        weights: of the pushes in the average; they sum to 1.
    """

    losses: tuple[float, ...]
    samples: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result of a case.

    Attributes:
        sizes: samples of the updates.
        name: of the parameter or buffer that differs most; empty: none differs.
        difference: its largest absolute difference.
        alone, shared: the first update of one worker and of several.
        rounding: the difference made by the last bit of each weight in one process; 0: not
            measured.
        has_own_batches: whether a script's own batch sampler makes the batches, not the case.
    """

    sizes: tuple[int, ...]
    name: str
    difference: float
    alone: FirstUpdate
    shared: FirstUpdate
    rounding: float = 0.0
    has_own_batches: bool = False


class Verifiable(ABC):
    """A program to verify."""

    name: str

    @abstractmethod
    def compare(self, case: VerifyCase) -> Compared:
        """Run it by one worker and by ``case.workers``."""

    @abstractmethod
    def breaking_layers(self, case: VerifyCase) -> tuple[BreakingLayer, ...]:
        """The model's layers that break on its first batch, shared by the workers of the case."""

    def draws(self, case: VerifyCase) -> bool:
        """Whether a step draws random numbers, apart from layers that the case sets aside."""
        return False


# -- a model in the case ---------------------------------------------------------------------------


def cast(dtype: Dtype, value: Tensor) -> Tensor:
    """Floats in the number format of a case; other values unchanged."""
    return value.to(getattr(torch, dtype)) if value.is_floating_point() else value


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Put these layers into ``eval`` for good."""
    for name, module in model.named_modules():
        if name in names:
            module.eval()
            module.train = partial(_stay, module)


def nudge(model: nn.Module) -> None:
    """Move each weight by its last bit, towards 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.nextafter(parameter, torch.zeros_like(parameter)))


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


# -- a run -----------------------------------------------------------------------------------------


def run_small(program: Program, workers: int, folder: Path, updates: int | None = None) -> Path:
    """Run inline under full-sync; returns the run's folder."""
    settings = RunSettings(
        workers=workers, engine="inline", device="cpu", updates=updates,
        run_dir=str(folder / "run"), checkpoint_every="never",
    )  # fmt: skip
    launch_run(program, settings, QuietObserver(io.StringIO()))
    return folder / "run"


def first_update(run: Path) -> FirstUpdate:
    """The first update in a run's trace."""
    pushes = {}
    order = Apply((), ())
    for record in read_trace(run / FILE_NAME):
        if isinstance(record, Handed):
            pushes[_key(record.fact.ticket)] = record.fact
        if isinstance(record, Ordered) and isinstance(record.order, Apply):
            order = record.order
            break
    parts = [pushes[_key(ticket)] for ticket in order.tickets]
    return FirstUpdate(
        losses=tuple(push.loss for push in parts),
        samples=tuple(push.num_samples for push in parts),
        weights=tuple(order.weights),
    )


def sizes_of(run: Path) -> tuple[int, ...]:
    """Samples of each update in a run's trace."""
    pushes, sizes = dict[tuple[int, int], int](), list[int]()
    for record in read_trace(run / FILE_NAME):
        if isinstance(record, Handed):
            pushes[_key(record.fact.ticket)] = record.fact.num_samples
        if isinstance(record, Ordered) and isinstance(record.order, Apply):
            sizes.append(sum(pushes[_key(ticket)] for ticket in record.order.tickets))
    return tuple(sizes)


def _key(ticket: Ticket) -> tuple[int, int]:
    return ticket.member, ticket.serial
