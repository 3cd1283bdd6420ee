"""The question about a split, and its model: with its numbers, or on the meta device.

On torch's meta device a model has shapes and no memory, so its size is known before it is made.
This module must not know how costs are measured.
"""

from dataclasses import dataclass

import psutil
import torch
from torch import nn

from ..config import refuse_too_many
from ..errors import ConfigError, PacelineError
from ..exports.subject import InputShape, Subject, find_subject, import_subject, own_subject
from ..partition.pipeline import workers
from ..system.limits import available_bytes
from ..system.reasons import reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitQuestion:
    """A model, and the workers that it is split over.

    Args:
        spec: a task, or package.module:function that returns a model.
        num_workers: n.
        inputs: the shape of each input of a model without a task, without the batch.
        memory_bytes: of each worker, with what Python and torch take.
        speeds: of each worker relative to this machine; all 1 by default.
        micro_batches: in an update; None: as many as a run takes.
        batch_size: samples of an update, over all workers; the task's by default.
        schedule: of a pipeline; empty: that of a run, 1f1b for a task and gpipe for a model.
    """

    spec: str
    num_workers: int
    inputs: tuple[InputShape, ...] = ()
    memory_bytes: int | None = None
    speeds: tuple[float, ...] = ()
    micro_batches: int | None = None
    batch_size: int | None = None
    schedule: str = ""

    def __post_init__(self) -> None:
        refuse_too_many(self.num_workers, "the number of workers")
        workers(self.num_workers, self.memory_bytes, self.speeds)
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ConfigError(f"--micro-batches must be >= 1, got {self.micro_batches}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"--batch-size must be >= 1, got {self.batch_size}")


def on_meta(question: SplitQuestion) -> Subject | None:
    """Return the model on the meta device; None if it cannot be made there, or not at all.

    The user's module is imported before, so tensors that it makes at import have their numbers.
    """
    try:
        import_subject(question.spec)
        with torch.device("meta"):
            return find_model(question)
    except ConfigError:
        return None


def find_model(question: SplitQuestion) -> Subject:
    """Return the model, and what makes its inputs.

    Raises:
        ConfigError: there is no such model, or it cannot be made.
    """
    try:
        if question.inputs:
            return own_subject(question.spec, question.inputs)
        return find_subject(question.spec, num_workers=question.num_workers)
    except PacelineError as error:
        if ":" in question.spec and "must be a paceline.Task" in str(error):
            raise ConfigError(
                f"{question.spec} is not a task; your own model needs the shape of its input, "
                "such as --input 1,3,32,32"
            ) from None
        raise ConfigError(str(error).removeprefix("--model ")) from error  # `export` has that flag
    except Exception as error:  # the user's model may raise anything
        raise ConfigError(
            f"the model of {question.spec} could not be made: {reason(error)}"
        ) from error


def is_too_large(model: nn.Module) -> bool:
    """Whether parameters, gradients and a copy of each do not fit the memory that is free here."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    return 4 * size > min(psutil.virtual_memory().available, available_bytes())
