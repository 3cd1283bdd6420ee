"""Random state as a pure function of the computation's place in the run.

A mini-batch that is computed again, by another member or in a replay, has the same dropout and
augmentation; in another epoch they differ. This module must not know leases or members.
"""

import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1
_FETCH_SALT, _STEP_SALT = 1, 2

_DRAW_NOTHING = frozenset((
    nn.Sequential, nn.Identity, nn.Flatten, nn.Unflatten, nn.Linear, nn.Embedding, nn.LayerNorm,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d,
    nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool2d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh,
    nn.Sigmoid,
))  # fmt: skip
"""Exact classes of layers whose forward and backward draw no random numbers."""


_NO_FORM = "does not have a deterministic implementation"
"""Torch's error message, after the name of the operation."""


def be_deterministic() -> None:
    """Restrict torch in this process to deterministic operations.

    Call it before an accelerator is used: cuBLAS reads its variable once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def without_form(error: BaseException) -> str:
    """The operation without a deterministic form, if that is the error; else empty."""
    operation, separator, _ = str(error).partition(_NO_FORM)
    return operation.strip() if separator and isinstance(error, RuntimeError) else ""


def mix(*numbers: int) -> int:
    """One 63-bit number from several; different inputs give unrelated outputs (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) * _MIX & ((1 << 64) - 1)
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & ((1 << 64) - 1)
        state ^= state >> 31
    return state & _MASK


def step_seed(seed: int, epoch: int, position: int, *, is_loading: bool = False) -> int:
    """The seed of the generators for the step on one mini-batch.

    With several workers each mini-batch has random state of its own, so dropout and augmentation
    do not depend on which worker computes it, or how often. The generators are seeded before its
    samples are fetched (``is_loading``) and again before the step, each time with another number::

        random.seed(number)
        torch.manual_seed(number)
        numpy.random.seed(number & 0xFFFFFFFF)

    Args:
        seed: of the run: ``pace.seed``.
        epoch: counted from 0.
        position: of the mini-batch's first sample in the epoch's order, counted from 0.

    Returns:
        A number of 63 bits.
    """
    return mix(seed, epoch, position, _FETCH_SALT if is_loading else _STEP_SALT)


GENERATORS = ("python", "numpy", "torch")
"""The random generators that every program has."""


def seed_generators(seed: int, names: Sequence[str] = GENERATORS) -> None:
    """Seed these generators; torch's include accelerators that are not in use yet."""
    if "python" in names:
        random.seed(seed)
    if "numpy" in names and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    if "torch" in names:
        torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed Python, NumPy (if loaded) and torch's CPU generator."""
    seed_generators(seed, ("python", "numpy"))
    torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed the generators of ``seed_host`` and those of accelerators."""
    seed_host(seed)
    for accelerator in _accelerators().values():
        accelerator.manual_seed(seed)


def _accelerators() -> dict[str, Any]:
    """By name, torch's modules of accelerators whose generators this process may use."""
    kinds: tuple[tuple[str, Any], ...] = ("cuda", torch.cuda), ("xpu", torch.xpu)
    modules = {name: module for name, module in kinds if module.is_initialized()}
    mps: Any = torch.mps  # does not say whether it is in use
    if mps.is_available() and not mps._is_in_bad_fork():
        modules["mps"] = mps
    return modules


def draws_nothing(model: nn.Module) -> bool:
    """Whether a step of this model certainly draws no random numbers."""
    return all(
        type(module) in _DRAW_NOTHING
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        for module in model.modules()
    ) and not any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        for parameter in model.parameters()
    )


def random_states() -> dict[str, Any]:
    """The states of Python, NumPy (if loaded), torch and the accelerators in use."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    accelerators = _accelerators().items()
    return states | {name: accelerator.get_rng_state() for name, accelerator in accelerators}


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the states that ``random_states`` returned."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    for name, accelerator in _accelerators().items():
        if name in states:
            accelerator.set_rng_state(states[name])


class kept_random_state:
    """A context manager that restores the random state at the end of the block."""

    def __enter__(self) -> None:
        self._states = random_states()

    def __exit__(self, *_: object) -> None:
        restore_random_states(self._states)
