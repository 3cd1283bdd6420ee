"""ONNX: the model for any runtime that reads it; checked here with onnxruntime.

Written by torch's exporter on top of ``torch.export``. It needs the extra ``[onnx]`` (onnx,
onnxscript, onnxruntime), and says so where that is missing.
"""

import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .base import Format, Run
from .exported import exported_program

_PARTS = ("onnx", "onnxscript", "onnxruntime")


def _check_parts() -> None:
    missing = [name for name in _PARTS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the format onnx needs {', '.join(missing)}: pip install 'paceline[onnx]'"
        )


class Onnx(Format):
    """The graph as an ONNX file, weights within."""

    name = "onnx"
    suffix = ".onnx"
    summary = "ONNX: for onnxruntime and others (needs paceline[onnx])"
    needs = "onnx"

    def write(
        self, model: nn.Module, inputs: Sequence[Tensor], path: Path, *, is_batch_fixed: bool
    ) -> None:
        """Export and write one file."""
        _check_parts()
        # The exporter talks about what it does; we say what came of it.
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        logging.getLogger("onnxscript").setLevel(logging.ERROR)
        graph = exported_program(model, inputs, is_batch_fixed=is_batch_fixed)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(graph, dynamo=True, verbose=False)
            assert program is not None
            program.save(str(path), external_data=False)

    def load(self, path: Path) -> Run:
        """The file in onnxruntime, on the CPU."""
        _check_parts()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        names = [one.name for one in session.get_inputs()]

        def run(*inputs: Tensor) -> Tensor:
            arrays = (value.numpy() for value in inputs)
            (output, *_) = session.run(None, dict(zip(names, arrays, strict=True)))
            return torch.from_numpy(output)

        return run
