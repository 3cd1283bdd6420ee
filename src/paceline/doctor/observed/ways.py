"""Wrappers around a model's ``forward`` that can be in effect together.

    model(x) -> bfloat16( channels_last( compiled( the model's own forward ) ) )

Where one fails, the call that it wraps is made without it, and the step goes on. This module must
not know how they are measured.
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
"""The time limit of each of the first calls: each new shape may be compiled for."""


class Ways:
    """The wrappers that are in effect around one model's ``forward``, from the inside out.

    Attributes:
        model: the model.
        own: its own ``forward``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.own = model, model.forward
        self._active: list[Way] = []

    def turn(self, way: "Way", is_on: bool) -> None:
        """Put one wrapper into effect, or remove it."""
        if is_on and way not in self._active:
            self._active = sorted([*self._active, way], key=lambda active: active.depth)
        elif not is_on and way in self._active:
            self._active.remove(way)
        if self._active:
            self.model.forward = self._forward
        else:
            vars(self.model).pop("forward", None)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.own
        for way in self._active:
            call = partial(way.through, call)
        return call(*args, **kwargs)


class Way(Knob):
    """A wrapper around a model's ``forward``; where it fails, the wrapped call is made without it.

    Attributes:
        depth: its place from the inside out; the compiled forward is innermost, 0.
    """

    depth = 1

    def __init__(self, ways: Ways) -> None:
        self.ways = ways

    def turn(self, is_on: bool) -> None:
        self.ways.turn(self, is_on)

    def through(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``inner`` in this way, or plainly once this way has failed."""
        if not self.failed:
            try:
                return self._through(inner, args, kwargs)
            except TooLong:
                self.failed = "it took too long"
            except Exception as error:  # a compiler may raise anything
                line = str(error).strip().partition("\n")[0]
                self.failed = f"{type(error).__name__}: {line}"[:120]
        return inner(*args, **kwargs)

    def _through(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class ChannelsLastWay(Way):
    """Convolution weights and images with their channels last in memory."""

    name = "channels_last"
    fix = "model.to(memory_format=torch.channels_last), and the same for the images"

    def turn(self, is_on: bool) -> None:
        super().turn(is_on)
        for parameter in self.ways.model.parameters():
            if parameter.dim() == 4:
                parameter.data = _in_layout(parameter.data, is_on)

    def _through(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        converted, keywords = tree_map(partial(_in_layout, is_last=True), (args, kwargs))
        return inner(*converted, **keywords)


class Compiled(Way):
    """The model's own ``forward``, compiled; it replaces what is inside."""

    name, fix, depth = "torch.compile", "model = torch.compile(model)", 0
    settle = 2

    def __init__(self, ways: Ways) -> None:
        super().__init__(ways)
        self._compiled = torch.compile(ways.own)
        self._num_calls = 0

    def _through(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._num_calls += 1
        if self._num_calls > _FIRST_CALLS:
            return self._compiled(*args, **kwargs)
        with time_limit(_COMPILE_S):
            return self._compiled(*args, **kwargs)


class Bfloat16(Way):
    """The forward pass under autocast to bfloat16, with outputs in float32."""

    name, changes = "bfloat16", True

    def __init__(self, ways: Ways, kind: str) -> None:
        super().__init__(ways)
        self.fix = f'with torch.autocast("{kind}", dtype=torch.bfloat16):'
        self._kind = kind

    def _through(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with torch.autocast(self._kind, dtype=torch.bfloat16):
            return tree_map(_in_float32, inner(*args, **kwargs))


def _in_float32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype is torch.bfloat16
    return value.float() if is_half else value


def _in_layout(value: Any, is_last: bool) -> Any:
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    layout = torch.channels_last if is_last else torch.contiguous_format
    return value.contiguous(memory_format=layout)
