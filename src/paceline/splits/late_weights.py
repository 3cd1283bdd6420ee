"""Gradients of linear layers' weights, once for several micro-batches.

    backward of a micro-batch    dx = dy W: the part before waits for it; x and dy are kept
    a while later                dW = dy^T x, of the rows of all that are kept

Nobody waits for a weight's gradient, so what other parts wait for comes sooner. And for each
micro-batch it would be made anew and added up, which moves three times as much as the weights have;
here it is one product of more rows. A layer whose inputs are series, (B, T, n), has so many rows
for its weights that what is kept is larger than these: it computes as always. What else a parameter
is used for adds to it as always, too.

Source: P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (the two halves of a backward
pass, apart). This module must not know micro-batches or schedules.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class LateWeights:
    """The linear layers of some modules; all but those that somebody watches or has changed.

    Layers with hooks, or whose parameters have some, of another class, also of one derived from
    ``nn.Linear``, and with a forward() of their own are left alone.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        layers = {id(one): one for module in modules for one in module.modules()}
        self._layers = [
            _Layer(one) for one in layers.values() if isinstance(one, nn.Linear) and _is_plain(one)
        ]
        self.num_bytes = 0
        """Of what was kept, the last time that it was added."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Meanwhile these layers compute so."""
        for one in self._layers:
            one.linear.forward = partial(_forward, one)  # type: ignore[method-assign]  # taken off below
        try:
            yield
        finally:
            for one in self._layers:
                del one.linear.forward

    def add(self) -> None:
        """To the weights' gradients, what is kept.

        A backward pass with a gradient: one without is a script's (script/patches.py).
        """
        self.num_bytes = sum(x.nbytes for one in self._layers for pair in one.rows for x in pair)
        for one in self._layers:
            if one.rows:
                weight, bias = one.linear.weight, one.linear.bias
                late = _Weighed.apply(weight, bias, one.rows)  # type: ignore[no-untyped-call]  # torch's has no types
                torch.autograd.backward([late], [torch.ones_like(late)])


class _Layer:
    """A linear layer, and what its output's gradients and its inputs were, in rows."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.anchor = torch.zeros((), requires_grad=True)
        """A backward pass comes here also where the input needs none."""
        self.rows: list[tuple[Tensor, Tensor]] = []


def _is_plain(layer: nn.Linear) -> bool:
    hooks = [layer._forward_hooks, layer._forward_pre_hooks]
    hooks += [layer._backward_hooks, layer._backward_pre_hooks]
    for one in layer.parameters():
        hooks += [getattr(one, kind, None) or {} for kind in _HOOKS_OF_TENSORS]
    return type(layer) is nn.Linear and "forward" not in vars(layer) and not any(hooks)


def _forward(layer: _Layer, x: Tensor) -> Tensor:
    linear = layer.linear
    if x.ndim != 2 or not (torch.is_grad_enabled() and linear.weight.requires_grad):
        return functional.linear(x, linear.weight, linear.bias)
    bias = None if linear.bias is None else linear.bias.detach()
    made: Tensor = _Late.apply(x, layer.anchor, linear.weight.detach(), bias, layer.rows)  # type: ignore[no-untyped-call]  # torch's has no types
    return made


class _Late(torch.autograd.Function):
    """A linear layer whose backward pass is of its input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (of_output,) = gradients
        ctx.rows.append((x, of_output))
        of_input = of_output @ weight if ctx.needs_input_grad[0] else None
        return of_input, None, None, None, None


class _Weighed(torch.autograd.Function):
    """What gives a layer's parameters their gradients, so that who watches these hears of it."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, rows: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.rows = rows
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        x, of_output = (torch.cat(one) for one in zip(*ctx.rows, strict=True))
        ctx.rows.clear()
        bias = of_output.sum(0) if ctx.needs_input_grad[1] else None
        return of_output.t() @ x, bias, None
