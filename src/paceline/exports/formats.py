"""The formats: a model goes into a file, and comes out as a function.

    torchscript   for torch::jit::load in C++ and torch.jit.load in Python. `script` compiles the
                  source of ``forward``, branches and loops as well; `trace` records what one run
                  did and keeps only that. PyTorch has said that it is no longer developed (the
                  deprecation notes of torch 2.10), and recommends ``torch.export``; it is here
                  because deployed programs load it, and because the chapter measures it
    export        the whole graph (no Python is left in it) as a .pt2 file, for other compilers and
                  for Python where there is torch, without the model's source
    aoti          AOTInductor generates C++ (or Triton on a GPU), compiles it and packs the shared
                  library with the weights: for Python by ``torch._inductor.aoti_load_package``, for
                  C++ by ``torch::inductor::AOTIModelPackageLoader``. It needs a C++ compiler here,
                  not where it runs
    onnx          for any runtime that reads it, by torch's exporter on top of ``torch.export``;
                  checked here with onnxruntime. It needs the extra ``[onnx]``

A format must not know where the model comes from, nor whether its outputs are right; `proof.py`
proves that for all formats alike.
"""

import importlib.util
import logging
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.jit._trace import TracerWarning

from ..errors import ConfigError

Run = Callable[..., Tensor]
"""Inputs, as many as the model has, each with the batch first -> the output."""

_ONNX_PARTS = ("onnx", "onnxscript", "onnxruntime")


class Format(ABC):
    """One way to write a model that is in evaluation mode.

    Attributes:
        name: as ``--format`` takes it.
        suffix: of its files.
        summary: one line for the help.
        needs: the extra of Paceline that it wants, or "".
    """

    name: str
    suffix: str
    summary: str
    needs: str = ""

    @abstractmethod
    def write(
        self, model: nn.Module, inputs: Sequence[Tensor], path: Path, *, is_batch_fixed: bool
    ) -> None:
        """Write ``model`` to ``path``.

        Args:
            model: in evaluation mode, on the device of ``inputs``.
            inputs: an example; its batch (axis 0 of each) is >= 2.
            path: the file.
            is_batch_fixed: whether the file only has to run with the example's batch.

        Raises:
            Exception: whatever the format's writer raises; `reasons.reason` puts it into words.
        """

    @abstractmethod
    def load(self, path: Path) -> Run:
        """The model in ``path`` as a function; it runs where it was written for."""


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
            torch.jit.script(model).save(str(path))

    def load(self, path: Path) -> Run:
        """The module in the file."""
        with _without_deprecations():
            loaded: Run = torch.jit.load(str(path))
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
            traced = torch.jit.trace(model, tuple(inputs))
            traced.save(str(path))


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


class Aoti(Format):
    """Machine code and weights."""

    name = "aoti"
    suffix = ".aoti.pt2"
    summary = "AOTInductor: machine code in a .pt2 package, for C++ and Python"

    def write(
        self, model: nn.Module, inputs: Sequence[Tensor], path: Path, *, is_batch_fixed: bool
    ) -> None:
        """Export, compile and write."""
        check_compiler()
        program = exported_program(model, inputs, is_batch_fixed=is_batch_fixed)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))

    def load(self, path: Path) -> Run:
        """The compiled model; it answers with what the model answered."""
        loaded: Run = torch._inductor.aoti_load_package(str(path))
        return loaded


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
        _check_onnx()
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
        _check_onnx()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        names = [node.name for node in session.get_inputs()]

        def run(*inputs: Tensor) -> Tensor:
            arrays = (value.numpy() for value in inputs)
            (output, *_) = session.run(None, dict(zip(names, arrays, strict=True)))
            return torch.from_numpy(output)

        return run


class _without_deprecations(warnings.catch_warnings):
    """Torch's own word on TorchScript is in this file's docstring; here it is not repeated."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", TracerWarning)  # the proof says it with figures


def exported_program(
    model: nn.Module, inputs: Sequence[Tensor], *, is_batch_fixed: bool
) -> ExportedProgram:
    """The graph of the model, with a batch dimension that is any number unless fixed."""
    dynamic = None if is_batch_fixed else tuple({0: Dim.DYNAMIC} for _ in inputs)
    with torch.no_grad():
        return torch.export.export(model, tuple(inputs), dynamic_shapes=dynamic)


def check_compiler() -> None:
    """Whether Inductor will find a C++ compiler.

    Raises:
        ConfigError: it will not.
    """
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "c++", "clang++"]
    if not any(shutil.which(name) for name in wanted):
        raise ConfigError(
            f"no C++ compiler: {', '.join(wanted)} is not on the path; install g++ "
            f"(Debian: apt install g++) or set CXX"
        )


def _check_onnx() -> None:
    missing = [name for name in _ONNX_PARTS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the format onnx needs {', '.join(missing)}: pip install 'paceline[onnx]'"
        )
