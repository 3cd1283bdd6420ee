"""A task or a script, run small: by one process, and by several workers in this one.

    task     a few samples, each drawn once     plain PyTorch   |   the standard loop, inline
    script   its loader with small batches      one worker      |   N workers, inline

Two rows of batches: even ones, which N divides, and uneven ones, whose parts differ by a sample. A
case can set layers aside, which then do nothing that depends on the batch (``eval``). The inline
engine runs all workers in this process, by the code of a live run. This module must not know why a
difference comes about.
"""

import io
import json
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from ..checkpoints.state import load_tensors
from ..config import RunSettings
from ..data.arrays import Splits
from ..data.feed import apply
from ..errors import ConfigError
from ..events import Apply, Ticket
from ..launch.launcher import launch_run
from ..porting.porting import check_script
from ..program import Program, ScriptProgram, TaskProgram
from ..replica.seeding import seed_all
from ..report.live import QuietObserver
from ..trace import FILE_NAME, read_trace
from ..trace.records import Handed, Ordered
from ..workloads.base import Task
from .layers import BreakingLayer, breaking_layers
from .plain import State, fresh, largest_difference, plain_run

UPDATES = 3
EACH = 4
"""Samples of a worker's part, of a task."""
SHIM = f"{__package__}.script"
FOUND = "found.pt"

Dtype = Literal["float64", "float32"]
DTYPES: tuple[Dtype, ...] = ("float64", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
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
class Update:
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
    """

    sizes: tuple[int, ...]
    name: str
    difference: float
    alone: Update
    shared: Update


class Subject(ABC):
    """What is verified."""

    name: str

    @abstractmethod
    def compare(self, case: Case) -> Compared:
        """Run it by one and by ``case.workers``."""

    @abstractmethod
    def breaking_layers(self, case: Case) -> tuple[BreakingLayer, ...]:
        """Of the model, on its first batch, shared by the workers of the case."""


# -- a task ----------------------------------------------------------------------------------------


class TaskSubject(Subject):
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
                f"task {task.name}: verify takes samples by their number, and its data is a "
                "stream; give a map-style data set of a few samples"
            )
        self._data = train
        self._samples: list[Any] = []

    def compare(self, case: Case) -> Compared:
        task = self._small(case)
        state, losses = plain_run(task)
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            ran = _launch(TaskProgram(task=task), case.workers, Path(folder))
            name, difference = largest_difference(state, load_tensors(ran / "model.safetensors"))
            shared = first_update(ran)
        size, rest = task.batch_size, case.workers + (not case.is_even)
        alone = Update(losses=(losses[0],), samples=(size,), weights=(1.0,))
        return Compared(
            sizes=(*[size] * (UPDATES - 1), rest),
            name=name, difference=difference, alone=alone, shared=shared,
        )  # fmt: skip

    def breaking_layers(self, case: Case) -> tuple[BreakingLayer, ...]:
        task = self._small(case)
        model, _ = fresh(task)
        inputs = torch.utils.data.default_collate(
            [one[0] for one in self._first(task.batch_size, case.dtype)]
        )
        return breaking_layers(model, [inputs], {}, case.workers)

    def _small(self, case: Case) -> Task:
        """The task on the samples of UPDATES updates, the last one short."""
        size, rest = case.batch_size(), case.workers + (not case.is_even)
        samples = self._first((UPDATES - 1) * size + rest, case.dtype)
        return replace(
            self._task,
            model=partial(_model, self._task, case.dtype, case.frozen),
            data=partial(_splits, samples),
            batch_size=size,
            epochs=1,
            notes=(),
        )

    def _first(self, count: int, dtype: Dtype) -> list[Any]:
        """So many samples; each is drawn once, so augmentation is the same in all runs."""
        if len(self._data) < count:
            raise ConfigError(
                f"task {self.name}: verify needs {count} samples for that many workers, its data "
                f"has {len(self._data)}; take fewer workers, -n 1,2"
            )
        while len(self._samples) < count:
            seed_all(len(self._samples))
            self._samples.append(self._data[len(self._samples)])
        return [apply(partial(cast, dtype), one) for one in self._samples[:count]]


class Kept(Dataset[Any]):
    """Samples in a list."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def _splits(samples: Sequence[Any]) -> Splits:
    return Splits(train=Kept(samples), source=f"{len(samples)} samples")


def _model(task: Task, dtype: Dtype, frozen: Sequence[str]) -> nn.Module:
    model = task.module().to(getattr(torch, dtype))
    freeze(model, frozen)
    return model


def cast(dtype: Dtype, value: Tensor) -> Tensor:
    """Floats in the number format of a case; all else as it is."""
    return value.to(getattr(torch, dtype)) if value.is_floating_point() else value


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Put these layers into ``eval`` for good."""
    for name, module in model.named_modules():
        if name in names:
            module.eval()
            module.train = partial(_stay, module)  # type: ignore[method-assign]


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


# -- a script --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the main worker of a script is asked to do; it travels as JSON.

    Args:
        case: whose batches and number format the script gets.
        folder: where the model's state is put.
        looks: whether to look for layers that break.
    """

    case: Case
    folder: str
    looks: bool = False

    def write(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Asked":
        values = json.loads(text)
        case = values.pop("case")
        return cls(case=Case(**{**case, "frozen": tuple(case["frozen"])}), **values)


class ScriptSubject(Subject):
    """A script with Paceline's lines; one worker is what several are held against.

    Args:
        args: the script's own.

    Raises:
        ConfigError: it is no script, or has no such lines.
    """

    def __init__(self, path: Path, args: Sequence[str] = ()) -> None:
        if not path.is_file():
            raise ConfigError(f"there is no script {path}; name a file, or a task")
        check_script(ScriptProgram(path=str(path)))
        self.name = path.stem
        self._path, self._args = path, tuple(args)

    def compare(self, case: Case) -> Compared:
        alone, first = self._run(case, 1)
        shared, update = self._run(case, case.workers)
        name, difference = largest_difference(alone["state"], shared["state"])
        return Compared(
            sizes=(alone["size"],) * UPDATES,
            name=name, difference=difference, alone=first, shared=update,
        )  # fmt: skip

    def breaking_layers(self, case: Case) -> tuple[BreakingLayer, ...]:
        found, _ = self._run(case, 1, looks=True)
        return tuple(found["layers"])

    def _run(self, case: Case, workers: int, *, looks: bool = False) -> tuple[Any, Update]:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder, _as_it_was(case.dtype):
            asked = Asked(case=case, folder=folder, looks=looks)
            args = (asked.write(), str(self._path), *self._args)
            program = ScriptProgram(path=SHIM, args=args, is_module=True)
            ran = _launch(program, workers, Path(folder), updates=UPDATES)
            found = Path(folder) / FOUND
            if not found.exists():
                raise ConfigError(
                    f"{self._path} ended without pace.prepare(model, optimizer, loader), so there "
                    "is nothing to compare; add the lines that paceline launch --check prints"
                )
            return torch.load(found, weights_only=False), first_update(ran)


@contextmanager
def _as_it_was(dtype: Dtype) -> Iterator[None]:
    """New tensors in this number format; what scripts change of their process is put back."""
    before, main = torch.get_default_dtype(), sys.modules["__main__"]
    argv, path = sys.argv, list(sys.path)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.set_default_dtype(before)
        sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path


# -- a run -----------------------------------------------------------------------------------------


def _launch(program: Program, workers: int, folder: Path, updates: int | None = None) -> Path:
    """Run inline under full-sync; the run's folder."""
    settings = RunSettings(
        workers=workers, engine="inline", device="cpu", updates=updates,
        run_dir=str(folder / "run"), checkpoint_every="never",
    )  # fmt: skip
    launch_run(program, settings, QuietObserver(io.StringIO()))
    return folder / "run"


def first_update(run: Path) -> Update:
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
    return Update(
        losses=tuple(one.loss for one in parts),
        samples=tuple(one.num_samples for one in parts),
        weights=tuple(order.weights),
    )


def _key(ticket: Ticket) -> tuple[int, int]:
    return ticket.member, ticket.serial
