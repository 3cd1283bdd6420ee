"""Export a model, check the file, and compare its size, latency and accuracy with the model's."""

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
"""About the longest time to measure accuracy of the model."""
_BLOCK_S = 0.05
"""About the time of a block of the model's calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency(Measured):
    """Times of a call with one batch size, of the eager model and of the file."""

    batch: int
    model: Timing
    file: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(Measured):
    """The written file and its measurements.

    Args:
        format: of the file.
        fell_back: why the requested format was not possible; "" if ``format`` is the requested one.
        weights_bytes: parameters and buffers of the model, before any reduction.
        max_differences: batch size -> largest difference of an output.
        reduction: largest difference of an output in this precision from float32, as a share of
            the outputs' spread; None: not measured.
        is_example_only: whether no other inputs than the example could be tried.
        accuracy: of the model in float32; None: not measured.
        file_accuracy: of the file, on the same ``accuracy_samples`` test samples.
        why_no_accuracy: why it was not measured, or "".
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
    reduction: float | None = None
    is_example_only: bool = False
    accuracy: float | None = None
    file_accuracy: float | None = None
    accuracy_samples: int = 0
    why_no_accuracy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The file to write.

    Args:
        form: a format's name.
        path: of the file; None: named after the subject, in the working directory.
        precision: of the weights.
        fixed_batch: the only batch size that the file accepts; None: any.
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
    """Write the file, check it against the model, and return its measurements.

    Raises:
        ConfigError: the file cannot be written or its outputs differ, and there is no fallback or
            it fails, too.
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
        say(f"{fell_back}\nfalling back to {form}, as requested")
        written = _write(subject, wanted, form)
    say("the file's outputs match the model's; measuring")
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
        reduction=written.reduction,
        is_example_only=written.is_example_only,
        latencies=tuple(_latency(subject, written, batch) for batch in written.differences),
        **_accuracies(subject, written, wanted.fixed_batch),
    )


def _accuracies(subject: Subject, written: Written, fixed_batch: int | None) -> dict[str, Any]:
    """Return both accuracies on the same samples, or why there are none.

    As many test samples are used as the model processes in about `_ACCURACY_S`.
    """
    if subject.checkpoint is None:
        return {"why_no_accuracy": "the weights are fresh; give --checkpoint RUN"}
    test = subject.task.splits().test if subject.task is not None else None
    num_test = len(test or ())  # type: ignore[arg-type]  # a map-style data set has a length
    if not num_test:
        return {"why_no_accuracy": "there is no test data"}
    batch = fixed_batch or min(60, num_test)
    if num_test < batch:
        return {"why_no_accuracy": f"{num_test} test samples are less than a batch of {batch}"}
    # The first call, which also opens the data, is not timed.
    if accuracy_of(subject.model, subject, batch, most=batch) is None:
        reason = "the task measures no accuracy (a metric named acc, accuracy or ..._acc)"
        return {"why_no_accuracy": reason}
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
    """Return the mean seconds of ``count`` calls, after one untimed call."""
    call()
    return elapsed_s(call, count) / count


def render_export(exported: Export) -> list[str]:
    """Return the lines of the report: the file, its accuracy, and its latency."""
    differences = ", ".join(
        f"{value:.1e} (batch {batch})" for batch, value in exported.max_differences.items()
    )
    only = "; proved on the example only" if exported.is_example_only else ""
    rows = [
        (f"batch {latency.batch}, {name}", three_figures(timing.median_s), quartiles(timing))
        for latency in exported.latencies
        for name, timing in (("model, eager", latency.model), ("file", latency.file))
    ]
    return [
        f"wrote        {exported.path} ({exported.format}, {exported.precision.value})",
        f"size         {format_bytes(exported.num_bytes)} on disk; the weights are "
        f"{format_bytes(exported.weights_bytes)}",
        f"equal        largest difference of an output: {differences}{only}",
        *_reduction(exported),
        f"accuracy     {_accuracy(exported)}",
        "",
        *table(("latency", "median", "middle half"), rows),
        *([f"note: not as {exported.fell_back}"] if exported.fell_back else []),
    ]


def _reduction(exported: Export) -> list[str]:
    if exported.reduction is None:
        return []
    return [f"float32      an output differs by up to {exported.reduction:.2%} of their spread"]


def _accuracy(exported: Export) -> str:
    if exported.accuracy is None or exported.file_accuracy is None:
        return f"not measured: {exported.why_no_accuracy}"
    change = exported.file_accuracy - exported.accuracy
    return (
        f"{exported.file_accuracy:.4f} (the float32 model {exported.accuracy:.4f}, "
        f"change {change:+.4f}; {exported.accuracy_samples:,} test samples)"
    )
