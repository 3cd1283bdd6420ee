"""An export as a whole: the file proved; its size, latency and accuracy beside the model's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..exports import find_format
from ..exports.proof import Written, accuracy_of, write_proved
from ..exports.reduced import Precision
from ..exports.subject import Subject
from ..plan import format_bytes
from ..report.text import table, three_figures
from .clock import elapsed_s
from .samples import (
    Measured,
    Timing,
    quartiles,
    take_turns,
)

_ROUNDS = 15
_ACCURACY_S = 10.0
"""About how long accuracy is measured at most."""
_BLOCK_S = 0.05
"""About how long the model's block of calls is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency(Measured):
    """One call with one batch, of the model as it was written and of the file."""

    batch: int
    model: Timing
    file: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(Measured):
    """The written file and its measurements.

    Args:
        format: the one that was used.
        fell_back: why it is not the one that was asked for; "" where it is.
        weights_bytes: parameters and buffers of the model as it was, float32.
        max_differences: of an output, by the batch.
        accuracy: of the model in float32; None where it was not measured.
        file_accuracy: of the file, on the same ``accuracy_samples`` test samples.
        why_no_accuracy: "" where there is one.
    """

    subject: str
    is_trained: bool
    format: str
    precision: Precision
    fell_back: str
    path: Path
    num_bytes: int
    weights_bytes: int
    max_differences: dict[int, float]
    latencies: tuple[Latency, ...]
    accuracy: float | None = None
    file_accuracy: float | None = None
    accuracy_samples: int = 0
    why_no_accuracy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The file to write.

    Args:
        form: a format's name.
        path: of the file; None: named after the subject, here.
        precision: of the weights.
        fixed_batch: the only batch that it must run with; None: any.
        fallback: the format to use when ``form`` is not possible; "" for none.
    """

    form: str
    path: Path | None = None
    precision: Precision = Precision.FP32
    fixed_batch: int | None = None
    fallback: str = ""

    def __post_init__(self) -> None:
        if self.fixed_batch is not None and self.fixed_batch < 1:
            raise ConfigError(f"--fixed-batch must be >= 1, got {self.fixed_batch}")


def export(subject: Subject, wanted: Wanted, say: Callable[[str], None]) -> Export:
    """Write, prove and measure.

    Raises:
        ConfigError: it cannot be written or differs, and no fallback was asked for or it fails.
    """
    form, fell_back = wanted.form, ""
    if wanted.fallback:
        find_format(wanted.fallback)
    try:
        written = _write(subject, wanted, form)
    except ConfigError as error:
        if not wanted.fallback:
            raise
        form, fell_back = wanted.fallback, str(error)
        say(f"{fell_back}\nfalling back to {form}, as asked")
        written = _write(subject, wanted, form)
    say("the file computes what the model computes; measuring")
    return Export(
        subject=subject.name,
        is_trained=subject.checkpoint is not None,
        format=form,
        precision=wanted.precision,
        fell_back=fell_back,
        path=written.path,
        num_bytes=written.num_bytes,
        weights_bytes=sum(
            value.numel() * value.element_size() for value in subject.model.state_dict().values()
        ),
        max_differences=written.differences,
        latencies=tuple(_latency(subject, written, batch) for batch in written.differences),
        **_accuracies(subject, written, wanted.fixed_batch),
    )


def _accuracies(subject: Subject, written: Written, fixed_batch: int | None) -> dict[str, Any]:
    """Accuracy of the model and of the file on the same samples: all, or a few seconds' worth."""
    if subject.checkpoint is None:
        return {"why_no_accuracy": "the weights are fresh; give --checkpoint RUN"}
    test = subject.task.splits().test if subject.task is not None else None
    num_test = len(test or ())  # type: ignore[arg-type]  # a map-style data set has a length
    if not num_test:
        return {"why_no_accuracy": "there is no test data"}
    batch = fixed_batch or min(60, num_test)
    if num_test < batch:
        return {"why_no_accuracy": f"{num_test} test samples are less than a batch of {batch}"}
    # The first call opens the data, too.
    if accuracy_of(subject.model, subject, batch, most=batch) is None:
        what = "the task measures no accuracy (a metric named acc, accuracy or ..._acc)"
        return {"why_no_accuracy": what}
    batch_s = elapsed_s(lambda: accuracy_of(subject.model, subject, batch, most=4 * batch)) / 4
    most = batch * max(1, round(_ACCURACY_S / batch_s))
    model = accuracy_of(subject.model, subject, batch, most)
    file = accuracy_of(written.run, subject, batch, most)
    assert model is not None
    assert file is not None
    return {"accuracy": model[0], "file_accuracy": file[0], "accuracy_samples": model[1]}


def _write(subject: Subject, wanted: Wanted, name: str) -> Written:
    form = find_format(name)
    suffix = "" if wanted.precision is Precision.FP32 else f"-{wanted.precision.value}"
    path = wanted.path or Path(f"{subject.name}{suffix}{form.suffix}")
    return write_proved(
        subject, form, path, precision=wanted.precision, fixed_batch=wanted.fixed_batch
    )


def _latency(subject: Subject, written: Written, batch: int) -> Latency:
    inputs = subject.inputs(batch)
    calls = {"model": lambda: subject.model(*inputs), "file": lambda: written.run(*inputs)}
    with torch.no_grad():
        _call_s(calls["model"], 2)
        count = max(1, min(1000, round(_BLOCK_S / _call_s(calls["model"], 3))))
        turns = {name: partial(_call_s, call, count) for name, call in calls.items()}
        return Latency(batch=batch, **take_turns(turns, _ROUNDS))


def _call_s(call: Callable[[], Tensor], count: int) -> float:
    """The mean of a block, after one call that does not count."""
    call()
    return elapsed_s(call, count) / count


def render_export(one: Export) -> list[str]:
    """What was written, then its latency."""
    differences = ", ".join(
        f"{value:.1e} (batch {batch})" for batch, value in one.max_differences.items()
    )
    rows = [
        (f"batch {each.batch}, {name}", three_figures(timing.median_s), quartiles(timing))
        for each in one.latencies
        for name, timing in (("model, eager", each.model), ("file", each.file))
    ]
    return [
        f"wrote        {one.path} ({one.format}, {one.precision.value})",
        f"size         {format_bytes(one.num_bytes)} on disk; the weights are "
        f"{format_bytes(one.weights_bytes)}",
        f"equal        largest difference of an output: {differences}",
        f"accuracy     {_accuracy(one)}",
        "",
        *table(("latency", "median", "middle half"), rows),
        *([f"note: not as {one.fell_back}"] if one.fell_back else []),
    ]


def _accuracy(one: Export) -> str:
    if one.accuracy is None or one.file_accuracy is None:
        return f"not measured: {one.why_no_accuracy}"
    change = one.file_accuracy - one.accuracy
    return (
        f"{one.file_accuracy:.4f} (the float32 model {one.accuracy:.4f}, change {change:+.4f}; "
        f"{one.accuracy_samples:,} test samples)"
    )
