"""What is asked of a split, and the model that it is asked of: with its numbers or without them.

On torch's meta device a model has shapes and no memory: so its size is known before it is made.
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
    """What is asked.

    Args:
        spec: a task, or package.module:function that returns a model.
        num_workers: n.
        inputs: of a model without a task: the shape of each, without the batch.
        memory_bytes: of each worker, with all that Python and torch take.
        speeds: of each beside this machine; all 1 by default.
        micro_batches: of an update; None: as many as a run takes.
        batch_size: of an update over all workers; the task's by default.
        schedule: of a pipeline; empty: as its run, 1f1b of a task, and of a model gpipe.
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
    """The model without its numbers; None: it cannot be made so, or not at all.

    Tensors that a module makes at import stay in it for all who use it later: they have their
    numbers.
    """
    try:
        import_subject(question.spec)
        with torch.device("meta"):
            return find_model(question)
    except ConfigError:
        return None


def find_model(question: SplitQuestion) -> Subject:
    """The model with its numbers, and what goes in.

    Raises:
        ConfigError: there is none, or it cannot be made.
    """
    try:
        if question.inputs:
            return own_subject(question.spec, question.inputs)
        return find_subject(question.spec, num_workers=question.num_workers)
    except PacelineError as error:
        if ":" in question.spec and "must be a paceline.Task" in str(error):
            raise ConfigError(
                f"{question.spec} is not a task; your own model needs the shape of its input, "
                f"such as --input 1,3,32,32"
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
