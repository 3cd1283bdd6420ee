"""Compute the weight gradients of linear layers once for several micro-batches.

    backward of a micro-batch    dx = dy W: the part before waits for it; x and dy are kept
    later                        dW = dy^T x, over the rows of all micro-batches

No part waits for a weight's gradient, so the gradients that parts do wait for are sent sooner. It
is also cheaper: one product with more rows, instead of one for each micro-batch that is added up,
which moves three times the bytes of the weights. A layer whose inputs are sequences, (B, T, n),
would have to keep more bytes than its weights have, and computes its gradients as usual; so does
one under autocast, whose types autograd converts. Other uses of a parameter add to its gradient as
usual, too.

Source: P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (splitting the backward pass in
two). This module must not know micro-batches or schedules.
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
    """The plain linear layers of some modules, whose weight gradients are computed late.

    Layers with hooks on them or on their parameters, subclasses of ``nn.Linear``, and layers with
    a replaced forward() are left alone.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        layers = {id(layer): layer for module in modules for layer in module.modules()}
        self._layers = [
            _Layer(layer)
            for layer in layers.values()
            if isinstance(layer, nn.Linear) and _is_plain(layer)
        ]
        self.num_bytes = 0
        """The bytes that were kept for the latest `add`."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what the weights' gradients need, instead of computing them, inside the block."""
        for layer in self._layers:
            layer.rows.clear()  # of a backward pass that an error ended before `add`
            layer.linear.forward = partial(_forward, layer)  # type: ignore[method-assign]  # removed below
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.linear.forward

    def add(self) -> None:
        """Add the gradients of all that is kept to the weights' gradients.

        The backward pass is called with a gradient: one without counts as the script's own
        (script/patches.py).
        """
        self.num_bytes = sum(
            tensor.nbytes for layer in self._layers for pair in layer.rows for tensor in pair
        )
        for layer in self._layers:
            if layer.rows:
                weight, bias = layer.linear.weight, layer.linear.bias
                root = _WeightGradients.apply(weight, bias, layer.rows)  # type: ignore[no-untyped-call]  # torch's has no types
                torch.autograd.backward([root], [torch.ones_like(root)])


class _Layer:
    """A linear layer, and the inputs and gradients of outputs that are kept for it."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes the backward pass reach the layer even if its input needs no gradient."""
        self.rows: list[tuple[Tensor, Tensor]] = []


def _is_plain(layer: nn.Linear) -> bool:
    hooks = [layer._forward_hooks, layer._forward_pre_hooks]
    hooks += [layer._backward_hooks, layer._backward_pre_hooks]
    for parameter in layer.parameters():
        hooks += [getattr(parameter, kind, None) or {} for kind in _HOOKS_OF_TENSORS]
    return type(layer) is nn.Linear and "forward" not in vars(layer) and not any(hooks)


def _forward(layer: _Layer, input: Tensor) -> Tensor:
    """Do what ``nn.Linear.forward(input)`` does; models may pass its argument by name."""
    linear = layer.linear
    is_late = torch.is_grad_enabled() and linear.weight.requires_grad
    if input.ndim != 2 or not is_late or torch.is_autocast_enabled(input.device.type):
        return functional.linear(input, linear.weight, linear.bias)
    bias, weight = None if linear.bias is None else linear.bias.detach(), linear.weight.detach()
    output: Tensor = _InputGradient.apply(input, layer.anchor, weight, bias, layer.rows)  # type: ignore[no-untyped-call]  # torch's has no types
    return output


class _InputGradient(torch.autograd.Function):
    """A linear layer whose backward pass computes the gradient of its input only."""

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
        (output_gradient,) = gradients
        ctx.rows.append((x, output_gradient))
        input_gradient = output_gradient @ weight if ctx.needs_input_grad[0] else None
        return input_gradient, None, None, None, None


class _WeightGradients(torch.autograd.Function):
    """Gives a layer's parameters their gradients through autograd, so that its hooks are called."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, rows: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.rows = rows
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        x, output_gradient = (torch.cat(tensors) for tensors in zip(*ctx.rows, strict=True))
        ctx.rows.clear()
        bias = output_gradient.sum(0) if ctx.needs_input_grad[1] else None
        return output_gradient.t() @ x, bias, None
