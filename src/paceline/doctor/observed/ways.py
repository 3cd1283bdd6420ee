"""Other ways through a model's ``forward``, which can be in effect together.

    model(x) -> bfloat16( channels_last( compiled( the model's own forward ) ) )

Where one fails, what it stands around is taken, and the step goes on. This module must not know
how they are measured.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...tuning.pairs import TooLong, time_limit
from .knob import Knob

_COMPILE_S, _FIRST_CALLS = 60.0, 4
"""Seconds, of each of the first calls: shapes may be compiled for one by one."""


class Ways:
    """The ways through one model's ``forward`` that are in effect, from the inside out."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.own = model, model.forward
        self._active: list[Way] = []

    def turn(self, way: "Way", is_on: bool) -> None:
        if is_on and way not in self._active:
            self._active = sorted([*self._active, way], key=lambda one: one.depth)
        elif not is_on and way in self._active:
            self._active.remove(way)
        if self._active:
            self.model.forward = self._forward
        else:
            vars(self.model).pop("forward", None)

    def _forward(self, *args: Any, **given: Any) -> Any:
        call = self.own
        for one in self._active:
            call = partial(one.through, call)
        return call(*args, **given)


class Way(Knob):
    """Another way through a model's ``forward``; where it fails, the script's own is taken.

    Attributes:
        depth: what is compiled is innermost, 0.
    """

    depth = 1

    def __init__(self, ways: Ways) -> None:
        self.ways = ways

    def turn(self, is_on: bool) -> None:
        self.ways.turn(self, is_on)

    def through(self, inner: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """What ``inner`` gives, or what this does instead."""
        if not self.failed:
            try:
                return self._through(inner, args, given)
            except TooLong:
                self.failed = "it took too long"
            except Exception as error:  # whatever a compiler raises: it cannot be had
                line = str(error).strip().partition("\n")[0]
                self.failed = f"{type(error).__name__}: {line}"[:120]
        return inner(*args, **given)

    def _through(self, inner: Callable[..., Any], args: Any, given: Any) -> Any:
        raise NotImplementedError


class ChannelsLastWay(Way):
    """Weights of convolutions and pictures with their channels last in memory."""

    name = "channels_last"
    fix = "model.to(memory_format=torch.channels_last), and the same of the pictures"

    def turn(self, is_on: bool) -> None:
        super().turn(is_on)
        for one in self.ways.model.parameters():
            if one.dim() == 4:
                one.data = _laid(one.data, is_on)

    def _through(self, inner: Callable[..., Any], args: Any, given: Any) -> Any:
        changed, words = tree_map(partial(_laid, is_last=True), (args, given))
        return inner(*changed, **words)


class Compiled(Way):
    """The model's own ``forward``, compiled."""

    name, fix, depth = "torch.compile", "model = torch.compile(model)", 0
    settle = 2

    def __init__(self, ways: Ways) -> None:
        super().__init__(ways)
        self._compiled = torch.compile(ways.own)
        self._num_calls = 0

    def _through(self, inner: Callable[..., Any], args: Any, given: Any) -> Any:
        self._num_calls += 1
        if self._num_calls > _FIRST_CALLS:
            return self._compiled(*args, **given)
        with time_limit(_COMPILE_S):
            return self._compiled(*args, **given)


class Bfloat16(Way):
    """The forward pass under autocast."""

    name, changes = "bfloat16", True

    def __init__(self, ways: Ways, kind: str) -> None:
        super().__init__(ways)
        self.fix = f'with torch.autocast("{kind}", dtype=torch.bfloat16):'
        self._kind = kind

    def _through(self, inner: Callable[..., Any], args: Any, given: Any) -> Any:
        with torch.autocast(self._kind, dtype=torch.bfloat16):
            return tree_map(_in_float32, inner(*args, **given))


def _in_float32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype is torch.bfloat16
    return value.float() if is_half else value


def _laid(value: Any, is_last: bool) -> Any:
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    form = torch.channels_last if is_last else torch.contiguous_format
    return value.contiguous(memory_format=form)
