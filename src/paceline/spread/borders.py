"""What a model is called with, and what crosses the borders between its parts.

    two sizes of a micro-batch through all parts -> each dimension's size, for any number of rows

This module must not know where a model is cut, nor why.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..partition.names import SplitName
from ..splits.parts import ModelPart, run_parts
from ..splits.tracing import untouched
from .chunks import TensorShape

Inputs = Callable[[int], tuple[Tensor, ...]]
"""What the model is called with, for so many samples."""


def inputs_of(model: nn.Module, forward: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
    """What the model is called with when ``forward`` computes a loss of this batch.

    Raises:
        ConfigError: it is not called with tensors alone, or not at all.
    """
    found: list[tuple[Any, Any]] = []

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((args, kwargs))
        raise _Called

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        forward(model, batch)
    except _Called:
        pass
    finally:
        handle.remove()
    if not found:
        raise ConfigError(
            "the model is not called with a batch of the loader, so nobody knows where to cut it: "
            "pace.prepare(..., forward=lambda model, batch: loss_fn(model(batch[0]), batch[1]))"
        )
    args, kwargs = found[0]
    if kwargs or not args or not all(isinstance(one, Tensor) for one in args):
        raise ConfigError(
            "a split model is called with tensors alone, model(x) or model(x, y): its other "
            "arguments would have to be sent to all parts"
        )
    return args


class _Called(BaseException):
    """It is known what the model is called with."""


def sent_bytes(
    model: nn.Module, borders: Sequence[Sequence[TensorShape]], rows: int, name: SplitName
) -> int:
    """Of an update: what crosses borders there and back, and gradients between copies."""
    others = rows * (name.parts - 1)
    total = _bytes(borders[0], others) + _bytes(borders[-1], others, is_back=True)
    total += sum(_bytes(one, rows * name.parts, is_back=True) for one in borders[1:-1])
    whole = sum(one.nbytes for one in model.parameters())
    return total * name.copies + 2 * (name.copies - 1) * whole


def _bytes(shapes: Sequence[TensorShape], rows: int, *, is_back: bool = False) -> int:
    """Of what crosses one border, with the gradients that come back."""
    return sum(one.num_bytes(rows) * (1 + (is_back and one.has_gradient)) for one in shapes)


def find_borders(
    model: nn.Module, parts: Sequence[ModelPart], inputs: Inputs, sizes: tuple[int, int]
) -> tuple[tuple[tuple[TensorShape, ...], ...], Any]:
    """What crosses each border for any number of rows, by two of them; the form of outputs."""
    for one, other in zip(*(inputs(size) for size in sizes), strict=True):
        if one.shape[1:] != other.shape[1:]:
            raise ConfigError(
                f"the loader makes batches of {list(one.shape)} and of {list(other.shape)}, and a "
                "split model needs rows of one size: pad all samples to it, or use --split data or "
                "shard"
            )
    with untouched(model), torch.no_grad():
        found = [_crossing(parts, inputs(size)) for size in sizes]
    form = torch.utils._pytree.tree_structure(_made_by(parts, model, inputs(sizes[0])))
    borders = tuple(
        tuple(shape_of(a, b, sizes) for a, b in zip(one, other, strict=True))
        for one, other in zip(*found, strict=True)
    )
    return borders, form


def _made_by(parts: Sequence[ModelPart], model: nn.Module, given: Sequence[Tensor]) -> Any:
    """What the model gives.

    Raises:
        ConfigError: not tensors alone.
    """
    with untouched(model), torch.no_grad():
        made = run_parts(parts, given)
    if not all(isinstance(one, Tensor) for one in torch.utils._pytree.tree_leaves(made)):
        raise ConfigError(
            f"{type(model).__name__} gives more than tensors, which cannot be sent from where it "
            "is computed: return tensors, in tuples or dicts"
        )
    return made


def _crossing(parts: Sequence[ModelPart], given: Sequence[Tensor]) -> list[list[Tensor]]:
    found = [list(given)]
    for part in parts:
        found.append(leaves_of(part.module(*found[-1])))
    return found


Flow = tuple[tuple[tuple[bool, ...], ...], ...]
"""Of each part but the first, for each tensor that it gives, which of those that it takes get a
gradient of it."""


def find_flow(parts: Sequence[ModelPart], given: Sequence[Tensor], *, is_known: bool) -> Flow:
    """Where gradients go, on an example.

    Args:
        is_known: whether it is the same for all examples; else all get one of all.
    """
    with torch.no_grad():
        entering = leaves_of(parts[0].module(*given))
    flow = []
    for part in parts[1:]:
        entering = [one.detach().requires_grad_(_has_gradient(one)) for one in entering]
        with torch.enable_grad():
            made = leaves_of(part.module(*entering))
        all_of_all = ((True,) * len(entering),) * len(made)
        flow.append(tuple(_reached(x, entering) for x in made) if is_known else all_of_all)
        entering = made
    return tuple(flow)


def _has_gradient(one: Tensor) -> bool:
    return one.is_floating_point() or one.is_complex()


def _reached(made: Tensor, entering: Sequence[Tensor]) -> tuple[bool, ...]:
    leaves = [one for one in entering if one.requires_grad]
    if not made.requires_grad or not leaves:
        return (False,) * len(entering)
    seed = torch.zeros_like(made)
    found = torch.autograd.grad(made, leaves, seed, retain_graph=True, allow_unused=True)
    reached = {id(one) for one, gradient in zip(leaves, found, strict=True) if gradient is not None}
    return tuple(id(one) in reached for one in entering)


def used_tensors(
    borders: Sequence[Sequence[TensorShape]], flow: Flow, outputs: int
) -> list[list[int]]:
    """Which tensors of each border get gradients, by their numbers.

    Args:
        outputs: which of the model's have one, a bit each.
    """
    used = [[
        number for number, shape in enumerate(borders[-1])
        if shape.has_gradient and outputs >> number & 1
    ]]  # fmt: skip
    for shapes, part in zip(reversed(borders[1:-1]), reversed(flow), strict=True):
        behind = used[0]
        used.insert(0, [
            number for number, shape in enumerate(shapes)
            if shape.has_gradient and any(part[made][number] for made in behind)
        ])  # fmt: skip
    return [[], *used]


def shape_of(one: Tensor, other: Tensor, sizes: tuple[int, int]) -> TensorShape:
    """How a tensor grows with rows."""
    if sizes[0] == sizes[1]:
        return TensorShape(one.dtype, tuple(one.shape), (0,) * one.ndim)
    step = sizes[1] - sizes[0]
    growing = [(b - a) // step for a, b in zip(one.shape, other.shape, strict=True)]
    fixed = [a - slope * sizes[0] for a, slope in zip(one.shape, growing, strict=True)]
    return TensorShape(one.dtype, tuple(fixed), tuple(growing))


def leaves_of(values: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(values) if isinstance(one, Tensor)]
