"""Write a model to a file, and keep the file only if it computes the same as the model.

The file is written to a temporary name, loaded, and run with several batch sizes on other inputs
than its example, and on altered ones (trials.py). A file with different outputs is deleted and
refused, and so is a precision in which the model is another one. This module must not know how
long anything takes.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..core.stats import accuracy_in
from ..data.arrays import ArrayDataset, collate_batch
from ..errors import ConfigError, PacelineError
from ..system.reasons import reason
from .formats import Format, Run
from .reduced import Precision, reduced
from .subject import Subject
from .trials import Inputs, are_known, trials_of

BATCHES = (1, 7)
_EXAMPLE_BATCH = 2
"""A batch of one is a special case to torch.export."""
_ALLOWED = {
    Precision.FP32: 1e-5,
    Precision.INT8: 1e-5,
    Precision.FP16: 1e-2,
    Precision.BF16: 8e-2,
}
"""Largest difference from the model in the same precision, times max(1, its largest output)."""
_GROSS = 0.25
"""Largest difference of a precision from float32, as a share of the outputs' spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file that was compared with its model.

    Args:
        path: of the file.
        num_bytes: of the file.
        model: the model that was written, in the file's precision.
        run: the loaded file as a function.
        differences: batch -> the largest absolute difference of an output.
        reduction: the largest difference of ``model`` from the float32 one, as a share of the
            spread of all outputs; None for float32, and for outputs that are integers.
        is_example_only: whether there were no other inputs to run the file on.
    """

    path: Path
    num_bytes: int
    model: nn.Module
    run: Run
    differences: dict[int, float]
    reduction: float | None = None
    is_example_only: bool = False


def write_proved(
    subject: Subject,
    form: Format,
    path: Path,
    *,
    precision: Precision = Precision.FP32,
    fixed_batch: int | None = None,
) -> Written:
    """Write the subject's model to ``path`` and prove the file.

    Args:
        precision: of the weights.
        fixed_batch: the only batch that the file must run with; None: any.

    Raises:
        ConfigError: the model cannot be written in this format (which construct, which line), or
            the file computes something else.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    example = subject.inputs(fixed_batch or _EXAMPLE_BATCH)
    _outputs(subject, subject.model, example)
    model = reduced(subject.model, precision, example)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.stem.split('.')[0]}.new{form.suffix}")
    try:
        _write(subject, form, model, example, beside, fixed_batch)
        batches = BATCHES if fixed_batch is None else (fixed_batch,)
        trials = {batch: _trials(subject, example, batch) for batch in batches}
        reduction = _reduction(subject, model, list(chain(*trials.values())), precision)
        run = form.load(beside)
        differences = {
            batch: _difference(subject, model, run, trials[batch], precision) for batch in batches
        }
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return Written(
        path=path,
        num_bytes=path.stat().st_size,
        model=model,
        run=run,
        differences=differences,
        reduction=reduction,
        is_example_only=all(are_known(tried, example) for tried in trials.values()),
    )


def _trials(subject: Subject, example: Inputs, batch: int) -> list[Inputs]:
    """Return the inputs to compare on; of the altered ones those that the model can take."""
    other, *altered = trials_of(subject.inputs, example, batch)
    _outputs(subject, subject.model, other)
    trials = [other]
    for values in altered:
        with suppress(ConfigError):
            if bool(_outputs(subject, subject.model, values).isfinite().any()):
                trials.append(values)
    return trials


def _write(
    subject: Subject,
    form: Format,
    model: nn.Module,
    example: Inputs,
    path: Path,
    fixed_batch: int | None,
) -> None:
    try:
        form.write(model, example, path, is_batch_fixed=fixed_batch is not None)
    except PacelineError:
        raise
    except Exception as error:  # an exporter raises anything
        why = reason(error)
        hint = "; --fixed-batch N writes one for N only" if "batch cannot vary" in why else ""
        raise ConfigError(
            f"{subject.name} cannot be written as {form.name}: {why}{hint}"
        ) from error


def _difference(
    subject: Subject, model: nn.Module, run: Run, trials: list[Inputs], precision: Precision
) -> float:
    """Return the largest difference over inputs of one batch size.

    Raises:
        ConfigError: it is too large, or the file does not run.
    """
    batch, largest = len(trials[0][0]), 0.0
    for values in trials:
        wanted = _outputs(subject, model, values)
        if not bool(wanted.isfinite().any()):
            raise ConfigError(
                f"refused: with batch {batch} no number of the model's output is finite, so there "
                "is nothing to compare; nothing was kept"
            )
        got = _output(subject, run, values, batch)
        if got.shape != wanted.shape:
            raise ConfigError(
                f"refused: with batch {batch} the file's output is {tuple(got.shape)}, the "
                f"model's {tuple(wanted.shape)}; nothing was kept"
            )
        difference, largest_value = _gap(got, wanted)
        allowed = _ALLOWED[precision] * max(1.0, largest_value)
        if not difference <= allowed:  # also if it is NaN
            raise ConfigError(
                f"refused: with batch {batch} the file's output differs from the model's by "
                f"{difference:.3g}, more than {allowed:.1g}; nothing was kept. A trace loses "
                "branches and fixes sizes; --format export or torchscript keeps them or says why"
            )
        largest = max(largest, difference)
    return largest


def _reduction(
    subject: Subject, model: nn.Module, trials: list[Inputs], precision: Precision
) -> float | None:
    """Return how far the model in fewer bits is from the float32 one, over the outputs' spread.

    Raises:
        ConfigError: it is more than the rounding of a network explains.
    """
    if precision is Precision.FP32:
        return None
    wanted = torch.cat([_outputs(subject, subject.model, values).flatten() for values in trials])
    if not wanted.is_floating_point():  # a class is another one as soon as two were close
        return None
    got = torch.cat([_outputs(subject, model, values).flatten() for values in trials])
    difference, largest_value = _gap(got, wanted)
    finite = wanted[wanted.isfinite()].double()
    spread = _largest(finite) + _largest(-finite)  # largest less smallest
    # Outputs that are all alike have no spread, and are rounded nevertheless.
    if not difference <= max(_GROSS * spread, _ALLOWED[precision] * max(1.0, largest_value)):
        raise ConfigError(
            f"refused: in {precision.value} an output of {subject.name} differs from the float32 "
            f"model's by {difference:.3g}, where all outputs spread over {spread:.3g}; nothing was "
            "kept. Another --precision may do"
        )
    return difference / spread if spread else 0.0


def _gap(got: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the largest difference, and the largest finite value of the model's output.

    Equal infinities, and NaN in both, do not differ.
    """
    if not wanted.is_complex():
        got, wanted = got.double(), wanted.double()
    is_same = (got == wanted) | (got.isnan() & wanted.isnan())
    gaps = (got - wanted).abs().masked_fill(is_same, 0.0)
    return _largest(gaps), _largest(wanted.abs()[wanted.isfinite()])


def _largest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0


def _outputs(subject: Subject, model: nn.Module, values: Inputs) -> Tensor:
    """Return the model's own output.

    Raises:
        ConfigError: the model does not run on these inputs, or does not return one tensor.
    """
    try:
        with torch.no_grad():
            wanted = model(*values)
    except Exception as error:  # the user's model may raise anything
        shapes = " and ".join(str(tuple(value.shape)) for value in values)
        raise ConfigError(
            f"{subject.name} does not run on an input of {shapes}: {reason(error)}"
        ) from error
    if not isinstance(wanted, Tensor):
        raise ConfigError(
            f"{subject.name} must return one tensor to be exported, got {type(wanted).__name__}"
        )
    return wanted


def _output(subject: Subject, run: Run, values: Inputs, batch: int) -> Tensor:
    try:
        with torch.no_grad():
            output = run(*values)
    except Exception as error:  # a runtime raises its own errors
        raise ConfigError(
            f"refused: the file of {subject.name} does not run with batch {batch}: "
            f"{reason(error)}; nothing was kept. --fixed-batch N writes one for N only"
        ) from error
    return output


def accuracy_of(
    run: Callable[..., Tensor], subject: Subject, batch: int, most: int
) -> tuple[float, int] | None:
    """Return the accuracy of ``run`` on the task's test samples, and their number.

    Args:
        run: the model, or its file.
        batch: samples at a time; an incomplete last batch is left out.
        most: largest number of samples, from the first on.

    Returns:
        Accuracy and number of samples; None where the task has no test data or no accuracy.
    """
    data = subject.task.splits().test if subject.task is not None else None
    if data is None:
        return None
    assert subject.task is not None
    right = total = 0.0
    with torch.no_grad():
        # Ours gathers a batch at once; samples of other data sets may be anything.
        collate = collate_batch if isinstance(data, ArrayDataset) else None
        loader = DataLoader(data, batch_size=batch, drop_last=True, collate_fn=collate)
        for inputs, targets in loader:
            metrics = subject.task.metrics(run(inputs), targets)
            counts = accuracy_in(metrics)
            if counts is None:
                return None
            right, total = right + counts[0], total + counts[1]
            if total + batch > most:
                break
    return (right / total, int(total)) if total else None
