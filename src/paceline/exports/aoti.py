"""AOTInductor: the model as machine code in a package, for C++ and for Python.

Inductor generates C++ (or Triton on a GPU), compiles it and packs the shared library with the
weights. ``torch._inductor.aoti_load_package`` runs it from Python and
``torch::inductor::AOTIModelPackageLoader`` from C++; no Python is needed to run it.
It needs a C++ compiler here, not where it runs.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .base import Format, Run
from .exported import exported_program


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
