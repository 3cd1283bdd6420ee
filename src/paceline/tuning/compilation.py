"""The model's forward and backward pass as compiled code (``torch.compile``).

    call(batch) -- training, a usual number of samples --> compiled graph
          |
          `------- anything else (evaluation, an epoch's last batch) --> eager

An epoch's last batch and an evaluation have shapes of their own; to compile for each of them would
cost more than it brings, and a graph for all shapes is slower for the usual one. The model object
stays the user's: names in ``state_dict``, ``isinstance`` and ``copy.deepcopy`` (which leaves the
compiled code behind) are as before.

Source: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
Transformation and Graph Compilation", ASPLOS 2024.
"""

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..replica.cancel import is_compiled

_COMPILERS = ("g++", "clang++", "c++")


def may_compile(device: torch.device) -> bool:
    """Whether there is what generated code is compiled with: g++ for a CPU, Triton for a GPU."""
    import importlib.util
    import os

    if device.type == "cpu":
        return "CXX" in os.environ or any(shutil.which(one) for one in _COMPILERS)
    return importlib.util.find_spec("triton") is not None


def compile_model(model: nn.Module, mode: str, sizes: frozenset[int]) -> None:
    """From now on training calls with ``sizes`` samples run compiled code.

    Raises:
        ConfigError: it is compiled already, or there is nothing to compile with.
    """
    device = next(model.parameters()).device
    if is_compiled(model):
        raise ConfigError("the model is compiled already; leave --compile out")
    if not may_compile(device):
        needed = "a C++ compiler (g++)" if device.type == "cpu" else "Triton"
        raise ConfigError(f"--compile {mode} needs {needed}, and there is none here; install it")
    import torch._inductor.config as inductor

    if torch.get_num_threads() == 1:  # the other cores are other workers', who compile as well
        inductor.compile_threads = 1
    eager: Callable[..., Any] = model._call_impl

    def run(*arguments: Any, **options: Any) -> Any:
        # A frame of ours: torch leaves frames of its own alone, so a model that is nothing but
        # an nn.Sequential would silently stay as it is (torch 2.13, model.compile()).
        return eager(*arguments, **options)

    compiled: Callable[..., Any] = torch.compile(run, mode=mode, dynamic=False)

    def call(*arguments: Any, **options: Any) -> Any:
        is_usual = model.training and torch.is_grad_enabled()
        if is_usual and _num_samples(arguments, options) in sizes:
            return compiled(*arguments, **options)
        return eager(*arguments, **options)

    model._compiled_call_impl = call


def _num_samples(arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    for one in (*arguments, *options.values()):
        if isinstance(one, Tensor) and one.ndim:
            return len(one)
    return 0
