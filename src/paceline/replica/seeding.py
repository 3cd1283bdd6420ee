"""Random state as a pure function of what is being computed.

A mini-batch that is done again, by another member or in a replay, sees the same dropout and the
same augmentation; another epoch sees others. This module must not know leases or members.
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
"""Exact classes of layers whose way forward and back draws no random numbers."""


_NO_FORM = "does not have a deterministic implementation"
"""What torch says of an operation, after its name."""


def be_deterministic() -> None:
    """From now on torch takes only operations that give the same bits each time, in this process.

    Before an accelerator is touched: cuBLAS reads its variable once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def without_form(error: BaseException) -> str:
    """The operation that has no deterministic form, where that is the error; else empty."""
    name, found, _ = str(error).partition(_NO_FORM)
    return name.strip() if found and isinstance(error, RuntimeError) else ""


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
    """What the generators are seeded with before the step on one mini-batch.

    With several workers each mini-batch has random state of its own, so dropout and augmentation
    do not depend on who computes it, or how often. Before its samples are fetched (``is_loading``)
    and again before the step, each with its own number::

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
"""Of random numbers, those that every program has."""


def seed_generators(seed: int, names: Sequence[str] = GENERATORS) -> None:
    """Seed these of them; torch's also of accelerators that nobody has touched yet."""
    if "python" in names:
        random.seed(seed)
    if "numpy" in names and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    if "torch" in names:
        torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed Python, NumPy (where it is loaded) and torch's generator of the CPU."""
    seed_generators(seed, ("python", "numpy"))
    torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed what ``seed_host`` does and the accelerators' generators."""
    seed_host(seed)
    for accelerator in _accelerators().values():
        accelerator.manual_seed(seed)


def _accelerators() -> dict[str, Any]:
    """By their names the modules of torch whose generators this process may draw from."""
    kinds: tuple[tuple[str, Any], ...] = ("cuda", torch.cuda), ("xpu", torch.xpu)
    found = {name: module for name, module in kinds if module.is_initialized()}
    mps: Any = torch.mps  # does not tell whether it was touched
    if mps.is_available() and not mps._is_in_bad_fork():
        found["mps"] = mps
    return found


def draws_nothing(model: nn.Module) -> bool:
    """Whether a step of this model surely draws no random numbers: it needs no random state."""
    return all(
        type(module) in _DRAW_NOTHING
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        for module in model.modules()
    ) and not any(
        one._backward_hooks or one._post_accumulate_grad_hooks for one in model.parameters()
    )


def random_states() -> dict[str, Any]:
    """Of Python, NumPy (where it is loaded), torch and the accelerators that were used."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    return states | {name: one.get_rng_state() for name, one in _accelerators().items()}


def restore_random_states(states: dict[str, Any]) -> None:
    """Put back what ``random_states`` gave."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    for name, accelerator in _accelerators().items():
        if name in states:
            accelerator.set_rng_state(states[name])


class kept_random_state:
    """Leave the random state of the block's surroundings as it was."""

    def __enter__(self) -> None:
        self._states = random_states()

    def __exit__(self, *_: object) -> None:
        restore_random_states(self._states)
