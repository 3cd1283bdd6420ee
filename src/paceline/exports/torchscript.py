"""TorchScript: a file that ``torch::jit::load`` runs in C++ and ``torch.jit.load`` in Python.

Two ways lead to it. `script` compiles the source of ``forward``, branches and loops as well;
`trace` records what one run did and keeps only that. PyTorch has said that TorchScript is no
longer developed (the deprecation notes of torch 2.10), and recommends ``torch.export``; it is
here because deployed programs load it, and because the chapter measures it.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from .base import Format, Run


class Scripted(Format):
    """The source of the model, compiled."""

    name = "torchscript"
    suffix = ".pt"
    summary = "TorchScript by torch.jit.script: for torch::jit::load in C++"

    def write(
        self, model: nn.Module, inputs: Sequence[Tensor], path: Path, *, is_batch_fixed: bool
    ) -> None:
        """Compile and write; the batch is never part of the code."""
        with _without_deprecations():
            torch.jit.script(model).save(str(path))  # type: ignore[no-untyped-call]

    def load(self, path: Path) -> Run:
        """The module in the file."""
        with _without_deprecations():
            loaded: Run = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
        return loaded


class Traced(Scripted):
    """What one run of the model did; branches that were not taken are gone."""

    name = "torchscript-trace"
    summary = "TorchScript by torch.jit.trace: what one run did, without branches"

    def write(
        self, model: nn.Module, inputs: Sequence[Tensor], path: Path, *, is_batch_fixed: bool
    ) -> None:
        """Run once, record and write."""
        with _without_deprecations(), torch.no_grad():
            traced = torch.jit.trace(model, tuple(inputs))  # type: ignore[no-untyped-call]
            traced.save(str(path))


class _without_deprecations(warnings.catch_warnings):
    """Torch's own word on TorchScript is in this file's docstring; here it is not repeated."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", TracerWarning)  # the proof says it with figures
