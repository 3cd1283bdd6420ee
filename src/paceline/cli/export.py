"""``paceline export``: write a model to a file that runs without its Python code."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import Parameter

from ..errors import ConfigError
from .flags import Json, say, show

if TYPE_CHECKING:
    from ..exports.subject import Subject


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Which model and weights are exported.

    Parameters
    ----------
    checkpoint
        Where the weights come from: a run's folder or a .safetensors file.
    model
        A model to export instead of a task: package.module:function, which returns an nn.Module.
    input
        Shape of one input of --model, batch first (repeat it for several inputs): 1,1,28,28 or
        1,128:int64.
    """

    checkpoint: Path | None = None
    model: str | None = None
    input: list[str] | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """Which file is written.

    Parameters
    ----------
    format
        Format of the file: torchscript, torchscript-trace, export, aoti or onnx.
    output
        Where to write the file [default: named after the model].
    precision
        Number format of the model: int8 for the weights only, fp16 and bf16 also for computing.
    fixed_batch
        Write a file for this batch only [default: any batch].
    fallback
        The format to use if the model cannot be exported in --format [default: none].
    """

    format: str = "export"
    output: Path | None = None
    precision: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    fixed_batch: int | None = None
    fallback: str = ""


NO_SOURCE, NO_FILE = SourceFlags(), FileFlags()


def export(
    task: str | None = None,
    /,
    *,
    source: SourceFlags = NO_SOURCE,
    file: FileFlags = NO_FILE,
    json: Json = False,
) -> None:
    """Write a model to a file, check that it computes the same, and measure its speed.

    Example: paceline export runs/latest --format aoti

    Parameters
    ----------
    task
        A built-in task or package.module:task, with fresh weights unless --checkpoint is given; or
        the folder of a task's run, with its weights.
    """
    from ..bench.exporting import Wanted, render_export
    from ..bench.exporting import export as export_
    from ..exports import find_format
    from ..exports.reduced import Precision

    find_format(file.format)
    wanted = Wanted(
        form=file.format,
        path=file.output,
        precision=Precision(file.precision),
        fixed_batch=file.fixed_batch,
        fallback=file.fallback,
    )
    result = export_(_subject(task, source), wanted, say)
    show(json, result.to_json, lambda: render_export(result))


def _subject(task: str | None, source: SourceFlags) -> "Subject":
    """The model of exactly one of TASK and --model."""
    from ..exports.subject import find_subject, own_subject, parse_input

    model, inputs = source.model, source.input

    if (task is None) == (model is None):
        raise ConfigError(
            "give either a task or a run's folder (paceline export lenet), or "
            "--model package.module:function with --input"
        )
    if model is not None:
        if not inputs:
            raise ConfigError("--model needs --input, such as --input 1,1,28,28 (batch first)")
        return own_subject(model, [parse_input(text) for text in inputs], source.checkpoint)
    assert task is not None
    if inputs:
        raise ConfigError("--input is only for --model: a task has its own input shape")
    return find_subject(task, source.checkpoint)
