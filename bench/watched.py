"""What a public script is told while it runs beside its plain twin, and what it is asked.

`bench/public_scripts.py` puts `BEGIN` before a script's first line and `END` behind its last one.
A "fixed" run is in fixed order, without dropout and noise, with batch norm on its running
statistics, in float64. In a twin whose turns are paired two turns make one update, of their mean
gradient: what two workers under full-sync compute. The rest are calls that cuts put into a script.
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
"""Told by the environment: where to save, whether all is fixed, what comes first, pairs."""
BEGIN = "import watched; watched.begin()\n"
END = "\nwatched.end()\n"
NUM_EPISODES = 8
"""Of a fixed run that would end by what one worker sees."""

_optimizers: list[torch.optim.Optimizer] = []
_halves: list["Halves"] = []
_place = [0]
"""Of the newest turn of a twin that goes over `turns`."""


def begin() -> None:
    """Seed everything, note each optimizer that is made, and fix what is to be fixed."""
    if first := os.environ.get(FIRST):
        __import__(first)
    _seed(0)
    made = torch.optim.Optimizer.__init__

    @functools.wraps(made)
    def noted(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if _is_the_scripts():
            _optimizers.append(self)
            if is_paired():
                _halves.append(Halves(self))

    torch.optim.Optimizer.__init__ = noted  # type: ignore[method-assign]  # every optimizer of a script is noted
    if is_fixed():
        _fix()
    if is_paired():
        nn.utils.clip_grad_norm_ = _in_pairs(nn.utils.clip_grad_norm_)


def _in_pairs(clip: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Clip the mean gradient of two turns, when it is there."""

    def clipped(*args: Any, **kwargs: Any) -> Tensor:
        wholes = [one.gather() for one in _halves]
        return clip(*args, **kwargs) if all(wholes) else torch.zeros(())

    return clipped


def _is_the_scripts() -> bool:
    """Whether an optimizer is made by no file of Paceline's, which may make one like it."""
    frame = sys._getframe(2)
    while str(frame.f_globals.get("__name__")).startswith("torch."):
        assert frame.f_back is not None
        frame = frame.f_back
    return not str(frame.f_globals.get("__name__")).startswith("paceline.")


class Halves:
    """An optimizer of a paired twin: it steps in every second turn, by the mean gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._first: list[Tensor | None] | None = None
        self._is_gathered = self._is_whole = False
        self._step = optimizer.step
        optimizer.step = self.step  # type: ignore[method-assign, assignment]  # the twin's is in pairs

    def gather(self) -> bool:
        """Whether the gradients are the mean of two turns now."""
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


# -- what cuts call --------------------------------------------------------------------------


def is_fixed() -> bool:
    return bool(os.environ.get(FIXED))


def is_paired() -> bool:
    return bool(os.environ.get(PAIRED))


def turns(numbers: Iterable[int]) -> Iterator[int]:
    """What a plain twin goes over where the script for Paceline goes over `pace.updates`."""
    repeats = 2 if is_paired() else 1
    each = (number for number in numbers for _ in range(repeats))
    for place, number in enumerate(each):
        _place[0] = place
        _seed(paceline.step_seed(0, 0, place))
        yield number


def is_main() -> bool:
    """Whether a twin's turn stands for the main worker's."""
    return not is_paired() or _place[0] % 2 == 0


def is_over(number: int, is_solved: bool) -> bool:
    """Whether a loop without an end is left: a fixed run goes by the number of its updates."""
    if not is_fixed():
        return is_solved
    return number >= NUM_EPISODES and (not is_paired() or not is_main())


def num_workers() -> int:
    """Over which workers' losses a sum of a fixed twin would be averaged."""
    return 2 if is_fixed() else 1


def eps() -> float:
    """Adam's: where it is small, a gradient's rounding is divided by what is as small."""
    return 1e-4 if is_fixed() else 1e-8


def state_seed() -> int | None:
    """Of an environment: its own, or what follows from a turn's random state."""
    return int(torch.randint(1 << 30, ())) if is_fixed() else None


def fix_item(index: int) -> None:
    """What a data set draws for an item follows from the item."""
    if is_fixed():
        random.seed(index)


# -- at the end ------------------------------------------------------------------------------


def end() -> None:
    """Save what the optimizers hold: parameters in their order, and learning rates."""
    groups = [group for optimizer in _optimizers for group in optimizer.param_groups]
    held = {
        "parameters": [p.detach().clone() for group in groups for p in group["params"]],
        "rates": [group["lr"] for group in groups],
    }
    torch.save(held, Path(os.environ[FOLDER]) / f"{os.getpid()}.pt")


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)


def _fix() -> None:
    """Nothing at random, nothing that looks at a whole batch, and rounding of float64."""
    torch.set_default_dtype(torch.float64)
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[assignment,misc]  # a script is run in double
    Tensor.float = Tensor.double  # type: ignore[method-assign]  # the same
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(functional, name, lambda input, *args, **kwargs: input)
    nn.modules.batchnorm._BatchNorm.forward = (  # type: ignore[method-assign]  # the same
        lambda self, input: functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )
    )
    _with(nn.RNNBase, "__init__", dropout=0.0)
    _with(DataLoader, "__init__", shuffle=False)
    RandomSampler.__iter__ = lambda self: itertools.islice(  # type: ignore[method-assign]  # the same
        itertools.cycle(range(len(self.data_source))), self.num_samples
    )
    for name in ("randn", "rand", "randn_like", "rand_like"):
        setattr(torch, name, _constant(getattr(torch, name)))
    for name in ("normal", "uniform", "rand", "randn", "random"):
        setattr(numpy.random, name, _constant_array(getattr(numpy.random, name)))


def _with(owner: type, name: str, **fixed: Any) -> None:
    """Call `owner.name` with these arguments in the place of those that are given by name."""
    called = getattr(owner, name)

    @functools.wraps(called)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return called(self, *args, **{n: fixed.get(n, value) for n, value in kwargs.items()})

    setattr(owner, name, changed)


def _constant(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        made = draw(*args, **kwargs)
        return made if kwargs.get("generator") else made.detach().fill_(0.3)

    return drawn


def _constant_array(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: numpy.full_like(draw(*args, **kwargs), 0.3)
