"""The ways in which one model can be run: as written, or through a compiler.

A way is a name and a function: model and example in, function out. All it does to get there is
part of its first call. The files that some of them write go into a folder that is thrown away.
This module must not know how a way is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..exports import FORMATS
from ..exports.base import Run

Way = Callable[[nn.Module, Sequence[Tensor], Path], Run]


def _eager(model: nn.Module, inputs: Sequence[Tensor], folder: Path) -> Run:
    return model


def _compiled(model: nn.Module, inputs: Sequence[Tensor], folder: Path) -> Run:
    if inputs[0].device.type == "cpu":
        from ..exports.aoti import check_compiler

        check_compiler()
    torch._dynamo.reset()
    compiled: Run = torch.compile(model)
    return compiled


def _by_file(name: str) -> Way:
    """Written in a format and loaded again, as a program elsewhere would have it."""

    def way(model: nn.Module, inputs: Sequence[Tensor], folder: Path) -> Run:
        form = FORMATS[name]
        path = folder / f"model{form.suffix}"
        # A batch of one is a special case to torch.export: the example has two.
        pair = tuple(torch.cat([value[:1], value[:1]]) for value in inputs)
        form.write(model, pair, path, is_batch_fixed=False)
        return form.load(path)

    return way


WAYS: Mapping[str, Way] = {
    "eager": _eager,
    "script": _by_file("torchscript"),
    "trace": _by_file("torchscript-trace"),
    "compile": _compiled,
    "export": _by_file("export"),
    "aoti": _by_file("aoti"),
}
"""As ``--ways`` takes them; the first is what the others are compared with."""

SUMMARIES: Mapping[str, str] = {
    "eager": "as written, operation by operation",
    "script": "TorchScript, compiled from the source",
    "trace": "TorchScript, recorded from one run",
    "compile": "torch.compile, default mode",
    "export": "torch.export, its graph run by Python",
    "aoti": "torch.export and AOTInductor, machine code",
}
