"""The model that is exported or measured: found by its task, its run, or its function.

    chapter-mlp          the MLP 512-256-128-2 of "Dive into Deep Learning", 13.1
    lenet, pkg.mod:task  a task: its model, and images of its test data as inputs
    runs/NAME            what a run trained; the task is the run's own
    pkg.mod:function     a function that returns an nn.Module, with inputs as they are written on a
                         command line: --input 1,1,28,28 or 1,128:int64

Above 300 lines, since each source of a model has its own inputs. It must not know what is done
with the model, nor any format.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from ..checkpoints.state import load_tensors, tensors_of, uncompiled
from ..errors import ConfigError, PacelineError, unknown
from ..system.reasons import reason
from ..trace import FILE_NAME, read_header
from ..workloads import TASKS, import_module, load_task
from ..workloads.base import Task
from .trials import Inputs

CHAPTER = "chapter-mlp"

_TYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}


class InputShape(NamedTuple):
    """One input: its shape without the batch, and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model in evaluation mode, and its inputs.

    Args:
        name: for tables.
        model: on the CPU; its weights are those of the checkpoint, if there is one.
        inputs: makes an example batch of a given size; always the same one.
        task: what it was made from, or None: then there is no data to measure accuracy on.
        checkpoint: where the weights came from, or None for fresh ones of seed 0.
    """

    name: str
    model: nn.Module
    inputs: Callable[[int], Inputs]
    task: Task | None = None
    checkpoint: Path | None = None


def chapter_mlp() -> nn.Module:
    """The chapter's network: (B, 512) -> (B, 2)."""
    return nn.Sequential(
        nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 2)
    )


def find_subject(spec: str, checkpoint: Path | None = None, num_workers: int = 1) -> Subject:
    """Return the subject that ``spec`` names: the chapter's MLP, a task, or the folder of a run.

    Args:
        num_workers: workers of the task; some tasks have larger batches for more workers.

    Raises:
        ConfigError: there is no such thing, or the checkpoint is another model's.
    """
    torch.manual_seed(0)
    if not spec:
        raise ConfigError("a task, a run's folder or package.module:function is required, got ''")
    if spec == CHAPTER:
        return _loaded(
            CHAPTER, chapter_mlp(), random_inputs([InputShape((512,), torch.float32)]), checkpoint
        )
    folder = Path(spec)
    if spec not in TASKS and folder.is_dir():
        return find_subject(_task_of_run(folder), checkpoint or folder, num_workers)
    task = load_task(spec, num_workers)
    return _loaded(task.name, task.module(), _inputs_of(task), checkpoint, task)


def import_subject(spec: str) -> None:
    """Import the module that makes a subject, without making it.

    Raises:
        ConfigError: there is no such thing, or importing it fails.
    """
    folder = Path(spec)
    if spec not in TASKS and folder.is_dir():
        spec = _task_of_run(folder)
    if spec in TASKS:
        TASKS[spec].factory()
    elif ":" in spec:
        import_module(spec.partition(":")[0], spec)


def own_subject(
    spec: str, shapes: Sequence[InputShape], checkpoint: Path | None = None, flag: str = "--model "
) -> Subject:
    """Return the user's own model as a subject.

    Args:
        spec: package.module:function, which takes no arguments and returns an ``nn.Module``; or
            package.module:model, which is one.
        flag: the option that named it, for messages.
        shapes: of each input without the batch, and its type.
        checkpoint: a run's folder or a .safetensors file.

    Raises:
        ConfigError: it cannot be imported or made, or is no module.
    """
    module_name, colon, attribute = spec.partition(":")
    if spec in TASKS:
        raise ConfigError(f"{spec} is a task and has its own inputs: leave --input out")
    if colon and module_name.endswith(".py"):
        module = module_name.removesuffix(".py").replace("/", ".")
        raise ConfigError(f"{flag}{spec!r} names a file; write the module, {module}:{attribute}")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{flag}{spec!r} must read package.module:function")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` has it
    torch.manual_seed(0)
    try:
        attribute_value = getattr(importlib.import_module(module_name), attribute)
        model = attribute_value if isinstance(attribute_value, nn.Module) else attribute_value()
    except PacelineError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{flag}{spec} could not be made: {reason(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{flag}{spec} must return an nn.Module, got {type(model).__name__}")
    return _loaded(attribute, model, _own_inputs(uncompiled(model), shapes), checkpoint)


def parse_input(text: str) -> InputShape:
    """Parse one ``--input``: sizes with the batch first, and a type if it is not float32.

    Raises:
        ConfigError: the text is not of this form.

    Example:
        >>> parse_input("1,128:int64")
        InputShape(shape=(128,), dtype=torch.int64)
    """
    sizes, _, kind = text.partition(":")
    if kind and kind not in _TYPES:
        raise unknown("type", kind, _TYPES, f"--input {text}")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(
            f"--input {text!r} must be sizes >= 1 with the batch first, such as 1,1,28,28 or "
            f"1,128:int64"
        )
    return InputShape(shape[1:], _TYPES[kind or "float32"])


def random_inputs(
    shapes: Sequence[InputShape], num_values: Sequence[int] = ()
) -> Callable[[int], Inputs]:
    """Return a function that makes inputs of N(0, 1), or of integers from 0 on.

    Inputs of the same batch size are the same, of others different.

    Args:
        num_values: integers of each input are less than this, >= 1; empty: 2 for all.
    """
    most = num_values or [2] * len(shapes)

    def inputs(batch: int) -> Inputs:
        generator = torch.Generator().manual_seed(batch)
        return tuple(
            torch.randn(batch, *shape, generator=generator).to(dtype)
            if dtype.is_floating_point
            else torch.randint(num, (batch, *shape), generator=generator).to(dtype)
            for (shape, dtype), num in zip(shapes, most, strict=True)
        )

    return inputs


def _own_inputs(model: nn.Module, shapes: Sequence[InputShape]) -> Callable[[int], Inputs]:
    """Return a function that makes inputs for the user's model, which it looks at only then."""
    num_values = functools.cache(partial(_num_values, model, shapes))
    return lambda batch: random_inputs(shapes, num_values())(batch)


def _num_values(model: nn.Module, shapes: Sequence[InputShape]) -> list[int]:
    """How many integers each input may have: rows of the smallest table of embeddings that it is
    looked up in; of others, which may be masks or kinds, 2."""
    drawn, found = random_inputs(shapes)(2), dict[int, int]()
    inputs = [one if one.is_floating_point() else torch.zeros_like(one) for one in drawn]
    places = {value.untyped_storage().data_ptr(): at for at, value in enumerate(inputs)}

    def note(table: nn.Module, args: tuple[object, ...]) -> None:
        rows = args[0] if args else None
        at = places.get(rows.untyped_storage().data_ptr(), -1) if isinstance(rows, Tensor) else -1
        num = int(table.num_embeddings)  # type: ignore[arg-type]  # a number, of such a layer
        found[at] = min(found.get(at, num), num)

    tables = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    handles = [table.register_forward_pre_hook(note) for table in tables]
    was_training = model.training
    try:
        # It may raise anything: then it is run again on its example, and refused.
        with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):
            if tables:
                model.eval()(*inputs)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return [found.get(at, 2) for at in range(len(shapes))]


def _inputs_of(task: Task) -> Callable[[int], Inputs]:
    """Return a function that gives the first test samples of a task; those to train on if none."""
    opened: list[object] = []

    def inputs(batch: int) -> Inputs:
        if len(opened) < batch:
            splits = task.splits()
            data = splits.test
            if data is None or not _length(data):
                data = splits.train
            count = _length(data)
            if not count:
                raise ConfigError(f"task {task.name}: its data has no samples")
            opened[:] = _alike(data, count, batch)
        try:
            made = default_collate(opened[:batch])  # as a loader does
        except TypeError:  # not numbers: images, texts
            made = None
        if not isinstance(made, Tensor):
            raise ConfigError(
                f"the inputs of the task's data are {type(opened[0]).__name__}, and a model that "
                "is exported or measured takes tensors: give it by the function that makes it, "
                "--model package.module:function --input 1,28,28"
            )
        return (made,)

    return inputs


def _alike(data: Dataset[tuple[Tensor, ...]], count: int, number: int) -> list[object]:
    """The first samples of the first one's shape, again from the start if there are too few."""
    found: list[object] = []
    for i in range(count):
        sample = data[i][0]
        if not found or getattr(sample, "shape", None) == getattr(found[0], "shape", None):
            found.append(sample)
        if len(found) == number:
            break
    return [found[i % len(found)] for i in range(number)]


def _length(data: Dataset[tuple[Tensor, ...]]) -> int:
    return len(data)  # type: ignore[arg-type]  # a map-style data set has a length


def _task_of_run(folder: Path) -> str:
    """Return the spec of a run's task.

    Raises:
        ConfigError: there is no run, or its task has no name.
    """
    if not (folder / FILE_NAME).exists():
        raise ConfigError(f"no run found at {folder}; runs are in runs/, see: ls runs")
    kind, _, name = read_header(folder / FILE_NAME).text("program", "").partition(" ")
    if kind == "task" and name:
        return name
    what = f"the script {name}" if kind == "script" else "a task that has no name to find it by"
    raise ConfigError(
        f"{folder} ran {what}; give the model by the function that makes it: paceline export "
        f"--model package.module:function --input 1,28,28 --checkpoint {folder}"
    )


def _loaded(
    name: str,
    model: nn.Module,
    inputs: Callable[[int], Inputs],
    checkpoint: Path | None,
    task: Task | None = None,
) -> Subject:
    """Return the subject; a compiled model is replaced by the module in it."""
    model = uncompiled(model)
    if checkpoint is not None:
        _load(model, name, checkpoint)
    return Subject(name=name, model=model.eval(), inputs=inputs, task=task, checkpoint=checkpoint)


def _load(model: nn.Module, name: str, checkpoint: Path) -> None:
    """Load the weights of a file, or of a run's folder, into ``model``."""
    path = checkpoint / "model.safetensors" if checkpoint.is_dir() else checkpoint
    if not path.exists():
        raise ConfigError(
            f"no checkpoint at {path}: give a run's folder (runs/NAME) or a .safetensors file"
        )
    state = load_tensors(path)
    wanted = tensors_of(model)
    differing = [
        f"{key} is {_kind(state[key])} there, {_kind(wanted[key])} here"
        for key in wanted
        if key in state and _kind(state[key]) != _kind(wanted[key])
    ]
    differing += [f"{key} is missing there" for key in wanted if key not in state]
    differing += [f"{key} is only there" for key in state if key not in wanted]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigError(
            f"{path} is a checkpoint of another model than {name}: {'; '.join(differing[:3])}{more}"
        )
    model.load_state_dict(state, strict=False)  # extra state that is no tensor is in no file


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
