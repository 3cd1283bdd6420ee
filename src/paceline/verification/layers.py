"""Finds layers that give a sample another output when workers share its batch.

    whole batch   layer 1 -> layer 2 -> layer 3          every output is kept
    each part     layer 1 -> layer 2 -> layer 3          its output is compared with these rows of
                      |          |          |            the whole, which then replace it
                      v          v          v

Since every layer of a part gets the inputs that it had in the whole batch, a layer that differs is
itself the cause: one pass finds each, the innermost one, of any class. A layer
that differs on the same batch with another seed draws random numbers; any other depends on the
whole batch. This module must not know workers or runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..data.feed import apply
from ..replica.seeding import kept_random_state, seed_all

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference that rounding makes in a layer; other formats: ``_COARSE``."""
_COARSE = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakingLayer:
    """A layer whose output for a sample differs in a part of the batch.

    Args:
        name: in the model, as in ``named_modules``; empty: the model itself.
        kind: its class.
        cause: ``batch``: it depends on the whole batch; ``random``: it draws random numbers.
    """

    name: str
    kind: str
    cause: Literal["batch", "random"]


def breaking_layers(
    model: nn.Module, arguments: Sequence[Any], options: Mapping[str, Any], parts: int
) -> tuple[BreakingLayer, ...]:
    """The layers of ``model`` that break, in the order in which they are called.

    Args:
        model: in training mode; its running statistics are updated.
        arguments, options: of one call, with a batch of B samples.
        parts: of the batch, as even as possible; at most B.
    """
    size = _batch_size((arguments, dict(options)))
    if size is None or size < parts or parts < 2:
        return ()
    with torch.no_grad(), kept_random_state(), _Calls(model, size).hooked() as calls:
        call = partial(_call, model, arguments, options, size)
        calls.record(lambda: call(0, size, seed=0))
        drawing = calls.compare(lambda: call(0, size, seed=1), 0, size)
        sharing: list[str] = []
        for start, stop in spans(size, parts):
            sharing += calls.compare(partial(call, start, stop, seed=0), start, stop)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    return tuple(
        BreakingLayer(name=name, kind=kinds[name], cause="random" if name in drawing else "batch")
        for name in dict.fromkeys([*drawing, *sharing])
    )


def spans(size: int, parts: int) -> Iterator[tuple[int, int]]:
    """The rows ``[start, stop)`` of each part, the longer ones first."""
    start, (each, more) = 0, divmod(size, parts)
    for number in range(parts):
        stop = start + each + (number < more)
        yield start, stop
        start = stop


def _call(
    model: nn.Module,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    size: int,
    start: int,
    stop: int,
    *,
    seed: int,
) -> None:
    """Call the model with these rows of its batch."""
    seed_all(seed)
    rows = partial(_rows, size=size, start=start, stop=stop)
    model(*apply(rows, list(arguments)), **apply(rows, dict(options)))


class _Calls:
    """The outputs of every module of a model, call by call."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self._modules = dict(model.named_modules())
        self._size = size
        self._whole: dict[str, list[Any]] = {}
        self._next: dict[str, int] = {}
        self._differing: list[str] = []
        self._span: tuple[int, int] | None = None
        """The rows that are compared; None: outputs are kept."""

    @contextmanager
    def hooked(self) -> Iterator["_Calls"]:
        hooks = [
            module.register_forward_hook(partial(self._heard, name))
            for name, module in self._modules.items()
        ]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def record(self, call: Any) -> None:
        """Keep all outputs of this call."""
        self._whole, self._span = {}, None
        call()

    def compare(self, call: Any, start: int, stop: int) -> list[str]:
        """The names of the modules that give other outputs for these rows."""
        self._next, self._differing, self._span = {}, [], (start, stop)
        call()
        return self._differing

    def _heard(self, name: str, module: nn.Module, arguments: Any, output: Any) -> Any:
        if self._span is None:
            self._whole.setdefault(name, []).append(apply(torch.clone, output))
            return None
        number = self._next.get(name, 0)
        self._next[name] = number + 1
        kept = self._whole.get(name, [])
        if number >= len(kept):
            return None
        start, stop = self._span
        rows = partial(_rows, size=self._size, start=start, stop=stop)
        wanted = apply(rows, kept[number])
        if not _are_close(_tensors(output), _tensors(wanted)):
            self._differing.append(name)
        shapes = [tensor.shape for tensor in _tensors(output)]
        if shapes == [tensor.shape for tensor in _tensors(wanted)]:
            return apply(torch.clone, wanted)
        return None


def _are_close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether all tensors with a row per sample agree; scalars are not compared."""
    for one, other in zip(found, wanted, strict=False):
        if one.shape != other.shape or not one.is_floating_point() or not one.numel():
            continue
        if one.ndim == 0:
            continue
        allowed = _CLOSE.get(one.dtype, _COARSE) * max(1.0, float(other.abs().max()))
        if not float((one - other).abs().max()) <= allowed:
            return False
    return True


def _rows(value: Tensor, *, size: int, start: int, stop: int) -> Tensor:
    """These rows of a tensor with one per sample, in any dimension; else all of it."""
    axis = next((i for i, length in enumerate(value.shape) if length == size), None)
    return value if axis is None else value.narrow(axis, start, stop - start)


def _batch_size(value: Any) -> int | None:
    """The first length of the first tensor."""
    return next((len(tensor) for tensor in _tensors(value) if tensor.ndim), None)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    apply(note, value)
    return found
