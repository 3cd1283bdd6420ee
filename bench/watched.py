"""Hooks in a public script and in its plain twin, which make the two comparable.

`bench/public_scripts.py` puts `BEGIN` before a script's first line and `END` behind its last one.
A "fixed" run is in fixed order, without dropout and noise, with batch norm on its running
statistics, in float64. In a paired twin two turns make one update, of their mean gradient: what
two workers under full-sync compute. The other functions are called by cuts in a script.
"""

import functools
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler

import paceline

FOLDER, FIXED, FIRST, PAIRED = "PUBLIC_FOLDER", "PUBLIC_FIXED", "PUBLIC_FIRST", "PUBLIC_PAIRED"
"""Environment variables: the folder to save to, whether to fix, a first import, whether to pair."""
BEGIN = "import watched; watched.begin()\n"
END = "\nwatched.end()\n"
NUM_EPISODES = 8
"""Episodes of a fixed run whose end would depend on what one worker sees."""

_optimizers: list[torch.optim.Optimizer] = []
_halves: list["Halves"] = []
_turn = [0]
"""Number of the newest turn of a twin that iterates over `turns`."""


def begin() -> None:
    """Seed everything, record each new optimizer, and fix what is to be fixed."""
    if first := os.environ.get(FIRST):
        __import__(first)
    _seed(0)
    original_init = torch.optim.Optimizer.__init__

    @functools.wraps(original_init)
    def init_and_record(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        if _is_made_by_script():
            _optimizers.append(self)
            if is_paired():
                _halves.append(Halves(self))

    torch.optim.Optimizer.__init__ = init_and_record  # type: ignore[method-assign]  # every optimizer of a script is recorded
    if is_fixed():
        _fix()
    if is_paired():
        nn.utils.clip_grad_norm_ = _clip_in_pairs(nn.utils.clip_grad_norm_)


def _clip_in_pairs(clip: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Clip the mean gradient of two turns, once it is complete."""

    def clipped(*args: Any, **kwargs: Any) -> Tensor:
        are_complete = [half.gather() for half in _halves]
        return clip(*args, **kwargs) if all(are_complete) else torch.zeros(())

    return clipped


def _is_made_by_script() -> bool:
    """Whether the script makes an optimizer, not Paceline, which may make one like it."""
    frame = sys._getframe(2)
    while str(frame.f_globals.get("__name__")).startswith("torch."):
        assert frame.f_back is not None
        frame = frame.f_back
    return not str(frame.f_globals.get("__name__")).startswith("paceline.")


class Halves:
    """An optimizer of a paired twin, which steps in every second turn, by the mean gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._first: list[Tensor | None] | None = None
        self._is_gathered = self._is_whole = False
        self._step = optimizer.step
        optimizer.step = self.step  # type: ignore[method-assign, assignment]  # the twin steps in pairs

    def gather(self) -> bool:
        """Average the gradients of two turns; return whether both are complete."""
        if self._is_gathered:
            return self._is_whole
        self._is_gathered, self._is_whole = True, self._first is not None
        if self._first is None:
            self._first = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        else:
            for parameter, half in zip(self._parameters, self._first, strict=True):
                if half is not None:
                    parameter.grad = (parameter.grad + half) / 2
            self._first = None
        return self._is_whole

    def step(self, *args: Any, **kwargs: Any) -> None:
        is_whole, self._is_gathered = self.gather(), False
        if is_whole:
            self._step(*args, **kwargs)


# -- called by cuts --------------------------------------------------------------------------


def is_fixed() -> bool:
    return bool(os.environ.get(FIXED))


def is_paired() -> bool:
    return bool(os.environ.get(PAIRED))


def turns(numbers: Iterable[int]) -> Iterator[int]:
    """Iterate in a plain twin where the script for Paceline iterates over `pace.updates`."""
    repeats = 2 if is_paired() else 1
    repeated = (number for number in numbers for _ in range(repeats))
    for place, number in enumerate(repeated):
        _turn[0] = place
        _seed(paceline.step_seed(0, 0, place))
        yield number


def is_main() -> bool:
    """Whether a twin's turn represents the main worker's."""
    return not is_paired() or _turn[0] % 2 == 0


def is_over(number: int, is_solved: bool) -> bool:
    """Whether to leave an endless loop: a fixed run stops after a number of updates."""
    if not is_fixed():
        return is_solved
    return number >= NUM_EPISODES and (not is_paired() or not is_main())


def num_workers() -> int:
    """Number of workers over which a fixed twin averages a summed loss."""
    return 2 if is_fixed() else 1


def eps() -> float:
    """Adam's epsilon: a small one divides a gradient's rounding error by a value as small."""
    return 1e-4 if is_fixed() else 1e-8


def state_seed() -> int | None:
    """Seed of an environment: None, or one that follows from a turn's random state."""
    return int(torch.randint(1 << 30, ())) if is_fixed() else None


def fix_item(index: int) -> None:
    """Make the random draws of a data set depend on an item's index alone."""
    if is_fixed():
        random.seed(index)


# -- end -------------------------------------------------------------------------------------


def end() -> None:
    """Save the optimizers' parameters, in order, and learning rates."""
    groups = [group for optimizer in _optimizers for group in optimizer.param_groups]
    state = {
        "parameters": [p.detach().clone() for group in groups for p in group["params"]],
        "rates": [group["lr"] for group in groups],
    }
    torch.save(state, Path(os.environ[FOLDER]) / f"{os.getpid()}.pt")


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)


def _fix() -> None:
    """Remove randomness and batch statistics, and compute in float64."""
    torch.set_default_dtype(torch.float64)
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[assignment,misc]  # a script runs in double
    Tensor.float = Tensor.double  # type: ignore[method-assign]  # the same
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(functional, name, lambda input, *args, **kwargs: input)
    nn.modules.batchnorm._BatchNorm.forward = (  # type: ignore[method-assign]  # the same
        lambda self, input: functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )
    )
    _override_arguments(nn.RNNBase, "__init__", dropout=0.0)
    _override_arguments(DataLoader, "__init__", shuffle=False)
    RandomSampler.__iter__ = lambda self: itertools.islice(  # type: ignore[method-assign]  # the same
        itertools.cycle(range(len(self.data_source))), self.num_samples
    )
    for name in ("randn", "rand", "randn_like", "rand_like"):
        setattr(torch, name, _make_constant(getattr(torch, name)))
    for name in ("normal", "uniform", "rand", "randn", "random"):
        setattr(numpy.random, name, _make_constant_array(getattr(numpy.random, name)))


def _override_arguments(owner: type, name: str, **overrides: Any) -> None:
    """Make `owner.name` use these values for keyword arguments of the same name."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **{n: overrides.get(n, value) for n, value in kwargs.items()})

    setattr(owner, name, override)


def _make_constant(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw_constant(*args: Any, **kwargs: Any) -> Tensor:
        sample = draw(*args, **kwargs)
        return sample if kwargs.get("generator") else sample.detach().fill_(0.3)

    return draw_constant


def _make_constant_array(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: numpy.full_like(draw(*args, **kwargs), 0.3)
