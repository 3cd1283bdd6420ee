"""Compile a model's training calls, and leave its other calls as they are.

    call(batch) -- training, a usual number of samples --> compiled graph
          |
          `------- anything else (evaluation, an epoch's last batch, other hooks) --> eager

An epoch's last batch and an evaluation have other shapes. Compiling for each of them costs more
than it saves, and a graph for all shapes is slower for the usual one. The model object stays the
user's: names in ``state_dict``, ``isinstance`` and ``copy.deepcopy`` (which does not copy the
compiled code) work as before. Random numbers are those of eager code, so dropout has the same masks
from the same seed; a hook that is added or removed after the first compiled call makes the calls
eager, since torch's compiled code does not look for hooks. This module must not know what else
makes a step faster.

Source: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
Transformation and Graph Compilation", ASPLOS 2024.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..replica.layers import is_compiled

_COMPILERS = ("g++", "clang++", "c++")


def may_compile(device: torch.device) -> bool:
    """Whether the compiler for generated code is installed: g++ for a CPU, Triton for a GPU."""
    if device.type == "cpu":
        return "CXX" in os.environ or any(shutil.which(name) for name in _COMPILERS)
    return importlib.util.find_spec("triton") is not None


def compile_model(model: nn.Module, mode: str, sizes: frozenset[int]) -> None:
    """Make training calls of the model with ``sizes`` samples run compiled code.

    Raises:
        ConfigError: the model is already compiled, or the compiler is not installed.
    """
    device = next(model.parameters()).device
    if is_compiled(model):
        raise ConfigError("the model is already compiled; leave --compile out")
    if not may_compile(device):
        compiler = "a C++ compiler (g++)" if device.type == "cpu" else "Triton"
        raise ConfigError(f"--compile {mode} needs {compiler}; none was found, so install it")
    import torch._inductor.config as inductor

    if torch.get_num_threads() == 1:  # the other cores belong to workers that compile as well
        inductor.compile_threads = 1
    eager: Callable[..., Any] = model._call_impl

    def run(*arguments: Any, **options: Any) -> Any:
        # torch does not compile its own frames, so without this one a plain nn.Sequential would
        # silently stay eager (torch 2.13, model.compile()).
        return eager(*arguments, **options)

    settings = {**torch._inductor.list_mode_options(mode), "fallback_random": True}
    compiled: Callable[..., Any] = torch.compile(run, dynamic=False, options=settings)
    hooks: _Hooks | None = None

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal hooks
        is_training = model.training and torch.is_grad_enabled()
        if is_training and _num_samples(arguments, options) in sizes:
            hooks = hooks or _Hooks(model)
            if hooks.are_unchanged():
                return compiled(*arguments, **options)
        return eager(*arguments, **options)

    model._compiled_call_impl = call


class _Hooks:
    """The hooks on a model's layers when it was compiled."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[dict[int, Any]] = [
            hooks
            for module in model.modules()
            for hooks in (
                module._forward_hooks, module._forward_pre_hooks,
                module._backward_hooks, module._backward_pre_hooks,
            )
        ]  # fmt: skip
        self._compiled = self._numbers()

    def _numbers(self) -> list[int]:
        """The numbers that torch gave to the hooks, each to one of them."""
        return list(chain.from_iterable(self._places))

    def are_unchanged(self) -> bool:
        return self._numbers() == self._compiled


def _num_samples(arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """The length of the first tensor among the arguments, else of the first inside one; else 0."""
    for value in (*arguments, *options.values()):
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    leaves = torch.utils._pytree.tree_leaves((arguments, options))  # in dicts and lists
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
