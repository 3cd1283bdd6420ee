"""``torch.export``: the graph of the model as a .pt2 file, for other compilers and for Python.

The graph is whole (no Python is left in it) and holds for every batch size, unless asked for one
only. ``torch.export.load`` reads it where there is torch, without the model's source.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from .base import Format, Run


def exported_program(
    model: nn.Module, inputs: Sequence[Tensor], *, is_batch_fixed: bool
) -> ExportedProgram:
    """The graph of the model, with a batch dimension that is any number unless fixed."""
    dynamic = None if is_batch_fixed else tuple({0: Dim.DYNAMIC} for _ in inputs)
    with torch.no_grad():
        return torch.export.export(model, tuple(inputs), dynamic_shapes=dynamic)


class Exported(Format):
    """The graph and the weights."""

    name = "export"
    suffix = ".export.pt2"
    summary = "torch.export: the whole graph as .pt2, for torch.export.load"

    def write(
        self, model: nn.Module, inputs: Sequence[Tensor], path: Path, *, is_batch_fixed: bool
    ) -> None:
        """Export and write."""
        program = exported_program(model, inputs, is_batch_fixed=is_batch_fixed)
        torch.export.save(program, str(path))

    def load(self, path: Path) -> Run:
        """The graph in the file as a module, run by Python node after node."""
        loaded: Run = torch.export.load(str(path)).module()
        return loaded
