"""A case of the table, what came of it, and how a program is run small.

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
"""Samples of a worker's part, of a task."""
CLOSE = 1e-6
"""In float32, what is beyond it is held against rounding alone."""

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
    """Whether every weight begins one last bit nearer to 0."""

    def batch_size(self, own: int | None = None) -> int:
        """Samples an update averages: N times a few, and one more where that is uneven.

        Args:
            own: the batch of a script, which is not exceeded where it can be.
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
        losses: as each worker's backward was called on them.
        samples: of each push.
        weights: that the pushes were averaged with; they sum to 1.
    """

    losses: tuple[float, ...]
    samples: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What came of a case.

    Attributes:
        sizes: samples of the updates.
        name: of the parameter or buffer that differs most; empty: none does.
        difference: its largest absolute difference.
        alone, shared: the first update of one and of several.
        rounding: the difference that the last bit of each weight makes in one process; 0: not
            measured.
        has_own_batches: whether they are as a script's own batch sampler makes them, and not those
            of the case.
    """

    sizes: tuple[int, ...]
    name: str
    difference: float
    alone: FirstUpdate
    shared: FirstUpdate
    rounding: float = 0.0
    has_own_batches: bool = False


class Verifiable(ABC):
    """What is verified."""

    name: str

    @abstractmethod
    def compare(self, case: VerifyCase) -> Compared:
        """Run it by one and by ``case.workers``."""

    @abstractmethod
    def breaking_layers(self, case: VerifyCase) -> tuple[BreakingLayer, ...]:
        """Of the model, on its first batch, shared by the workers of the case."""

    def draws(self, case: VerifyCase) -> bool:
        """Whether a step draws random numbers, also where the case sets layers aside."""
        return False


# -- a model in the case ---------------------------------------------------------------------------


def cast(dtype: Dtype, value: Tensor) -> Tensor:
    """Floats in the number format of a case; all else as it is."""
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
    """Run inline under full-sync; the run's folder."""
    settings = RunSettings(
        workers=workers, engine="inline", device="cpu", updates=updates,
        run_dir=str(folder / "run"), checkpoint_every="never",
    )  # fmt: skip
    launch_run(program, settings, QuietObserver(io.StringIO()))
    return folder / "run"


def first_update(run: Path) -> FirstUpdate:
    """Out of a run's trace."""
    pushes = {}
    order = Apply((), ())
    for record in read_trace(run / FILE_NAME):
        if isinstance(record, Handed):
            pushes[_key(record.fact.ticket)] = record.fact
        if isinstance(record, Ordered) and isinstance(record.order, Apply):
            order = record.order
            break
    parts = [pushes[_key(one)] for one in order.tickets]
    return FirstUpdate(
        losses=tuple(one.loss for one in parts),
        samples=tuple(one.num_samples for one in parts),
        weights=tuple(order.weights),
    )


def sizes_of(run: Path) -> tuple[int, ...]:
    """Samples of each update, out of a run's trace."""
    pushes, sizes = dict[tuple[int, int], int](), list[int]()
    for record in read_trace(run / FILE_NAME):
        if isinstance(record, Handed):
            pushes[_key(record.fact.ticket)] = record.fact.num_samples
        if isinstance(record, Ordered) and isinstance(record.order, Apply):
            sizes.append(sum(pushes[_key(one)] for one in record.order.tickets))
    return tuple(sizes)


def _key(ticket: Ticket) -> tuple[int, int]:
    return ticket.member, ticket.serial
