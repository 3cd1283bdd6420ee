"""Gradients of members that hold equal parameters, computed in one go.

    members at version v      leases of one size     one call               one row a member
    [ 3 ] [ 5 ] [ 6 ] ...  -> inputs (M, m, ...)  -> vmap(grad(loss))(v) -> gradient, loss

``torch.func.vmap`` over the members of ``torch.func.grad``, traced once for each M and m into a
TorchScript: taking the model apart at each call costs more than small gradients do, and so would
Python between the operations (softmax, 8 x 64 samples: 665 us with it, 440 without). M is a power
of two, so few traces are made. Sums are done in another order than one at a time, so a gradient is
the same within ``TOLERANCE`` of its largest entry; the first of each trace is held against one that
is computed alone.
What a model must not do is told by name: keep statistics of a batch, or draw random numbers, which
live runs seed for each mini-batch. This module must not know versions, members or leases.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..errors import ConfigError
from ..workloads.base import Task

TOLERANCE = 1e-5
"""Of the largest entry of a gradient; float32, and what the sums of a layer come to."""
MOST = 16
"""Gradients in one go: more take memory and no less time each."""

Rows = tuple[Tensor, list[Tensor | None]]
"""Losses (M,), and (M, ...) for each parameter; None where the loss does not depend on it."""


class Together:
    """The gradients of one model for several mini-batches at once.

    Args:
        model: trained in place; its memory is read at each call.

    Raises:
        ConfigError: the model cannot be computed so; names the module.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task = task
        self._model = model
        self._named = list(model.named_parameters())
        self._names = [name for name, one in self._named if one.requires_grad]
        self._is_used: dict[str, bool] = {}
        self._traced: dict[tuple[torch.Size, torch.Size], Callable[..., Any]] = {}
        if not self._names:
            raise self._refusal("nothing of it is trained")
        for name, module in model.named_modules():
            if why := _obstacle(module):
                raise self._refusal(f"module {name!r} ({type(module).__name__}) {why}")

    def rows(self, inputs: Tensor, targets: Tensor) -> Rows:
        """A loss and a gradient for each mini-batch.

        Args:
            inputs: (M, m, ...).
            targets: (M, m, ...).
        """
        trained = {name: one.detach() for name, one in self._named if one.requires_grad}
        key = inputs.shape, targets.shape
        compute = self._traced.get(key)
        is_new = compute is None
        if compute is None:
            compute = self._traced[key] = self._trace(trained, inputs, targets)
        with torch.no_grad():
            *found, losses = compute(*trained.values(), inputs, targets)
        gradients = dict(zip(self._names, found, strict=True))
        if is_new:
            self._compare(gradients, inputs[0], targets[0])
        return losses, [
            gradients[name] if self._is_used.get(name) else None for name, _ in self._named
        ]

    def _trace(
        self, trained: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> Callable[..., Any]:
        """Takes what is trained, inputs and targets; returns a gradient of each, and the losses."""
        from torch.fx.experimental.proxy_tensor import make_fx  # here: it imports sympy

        frozen = {name: one.detach() for name, one in self._named if not one.requires_grad}

        def loss(trained: dict[str, Tensor], one: Tensor, its: Tensor) -> Tensor:
            return self._task.loss(functional_call(self._model, {**frozen, **trained}, (one,)), its)

        together = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="error")
        try:
            traced: Callable[..., Any] = make_fx(together)(trained, inputs, targets)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            first = str(error).strip().partition("\n")[0]
            raise self._refusal(f"{type(error).__name__}: {first}") from None
        return _without_python(traced, self._names, (*trained.values(), inputs, targets))

    def _compare(self, gradients: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> None:
        """Hold the first gradient against one that is computed alone."""
        self._model.zero_grad()
        self._task.loss(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._model.named_parameters():
            alone = parameter.grad
            self._is_used[name] = alone is not None
            if alone is None:
                continue
            off = float((gradients[name][0] - alone).abs().max())
            size = float(alone.abs().max())
            if off > TOLERANCE * size:
                raise self._refusal(
                    f"the gradient of {name!r} is off by {off:.2g} of {size:.2g}; wanted is "
                    f"{TOLERANCE:g} of it"
                )
        self._model.zero_grad()

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"--batched cannot compute {self._task.name}: {why}; leave --batched out, then "
            "gradients are computed one at a time"
        )


def _without_python(
    traced: Callable[..., Any], names: list[str], example: tuple[Tensor, ...]
) -> Callable[..., Any]:
    """The same operations, from flat tensors to flat tensors, with no Python between them."""

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        trained = dict(zip(names, tensors[:-2], strict=True))
        gradients, losses = traced(trained, *tensors[-2:])
        return (*(gradients[name] for name in names), losses)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated: nothing else has no compiler
        script: Callable[..., Any] = torch.jit.trace(flat, example, check_trace=False)  # type: ignore[no-untyped-call]
    return script


def num_together(num_waiting: int) -> int:
    """How many of them go together: the largest power of two, at most ``MOST``."""
    return 1 << (min(num_waiting, MOST).bit_length() - 1)


def _obstacle(module: nn.Module) -> str:
    """Why members cannot go through this module together; empty where they can."""
    if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
        return "keeps running statistics, which each member changes in turn"
    if isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU) and getattr(module, "p", True):
        return "draws random numbers, which are seeded for each mini-batch"
    return ""
