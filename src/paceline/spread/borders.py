"""Find what a model is called with, and what crosses the borders between its parts.

    micro-batches of two sizes through all parts -> each dimension's size, for any number of rows

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
"""Returns what the model is called with, for a number of samples."""


def inputs_of(model: nn.Module, forward: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
    """Return what ``forward`` calls the model with, when it computes the loss of a batch.

    Raises:
        ConfigError: the model is not called, or not with tensors alone.
    """
    calls: list[tuple[Any, Any]] = []

    def record(_: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))
        raise _Called

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        forward(model, batch)
    except _Called:
        pass
    finally:
        handle.remove()
    if not calls:
        raise ConfigError(
            "the model is not called with a batch of the loader, so there is no input to cut it "
            "by: pace.prepare(..., forward=lambda model, batch: loss_fn(model(batch[0]), batch[1]))"
        )
    args, kwargs = calls[0]
    if kwargs or not args or not all(isinstance(arg, Tensor) for arg in args):
        raise ConfigError(
            "a split model is called with tensors alone, model(x) or model(x, y): its other "
            "arguments would have to be sent to all parts"
        )
    return args


class _Called(BaseException):
    """The call of the model was recorded; nothing is computed."""


def sent_bytes(
    model: nn.Module,
    borders: Sequence[Sequence[TensorShape]],
    rows: int,
    name: SplitName,
    target: TensorShape | None = None,
) -> int:
    """Return the bytes per update over all borders, both ways, and of gradients between copies.

    Args:
        rows: of each worker's mini-batch.
        target: of the loss that the last part computes; None: outputs go to the script's workers.
    """
    remote_rows = rows * (name.parts - 1)
    total = _bytes(borders[0], remote_rows)
    if target is None:
        total += _bytes(borders[-1], remote_rows, is_back=True)
    else:
        total += target.num_bytes(remote_rows)
    total += sum(_bytes(shapes, rows * name.parts, is_back=True) for shapes in borders[1:-1])
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return total * name.copies + 2 * (name.copies - 1) * parameter_bytes


def _bytes(shapes: Sequence[TensorShape], rows: int, *, is_back: bool = False) -> int:
    """Return the bytes over one border, with gradients that come back if ``is_back``."""
    return sum(shape.num_bytes(rows) * (1 + (is_back and shape.has_gradient)) for shape in shapes)


def find_borders(
    model: nn.Module, parts: Sequence[ModelPart], inputs: Inputs, sizes: tuple[int, int]
) -> tuple[tuple[tuple[TensorShape, ...], ...], Any]:
    """Return what crosses each border for any number of rows, and the form of the outputs.

    Args:
        sizes: two numbers of rows to run the parts with.
    """
    for few, more in zip(*(inputs(size) for size in sizes), strict=True):
        if few.shape[1:] != more.shape[1:]:
            raise ConfigError(
                f"the loader makes batches of {list(few.shape)} and of {list(more.shape)}, and a "
                "split model needs rows of one size: pad all samples to it, or use --split data or "
                "shard"
            )
    with untouched(model), torch.no_grad():
        runs = [_crossing(parts, inputs(size)) for size in sizes]
    form = torch.utils._pytree.tree_structure(_outputs(parts, model, inputs(sizes[0])))
    borders = tuple(
        tuple(shape_of(few, more, sizes) for few, more in zip(*border, strict=True))
        for border in zip(*runs, strict=True)
    )
    return borders, form


def _outputs(parts: Sequence[ModelPart], model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """Return the model's outputs.

    Raises:
        ConfigError: they are not tensors alone.
    """
    with untouched(model), torch.no_grad():
        outputs = run_parts(parts, inputs)
    if not all(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves(outputs)):
        raise ConfigError(
            f"{type(model).__name__} gives more than tensors, which cannot be sent from where it "
            "is computed: return tensors, in tuples or dicts"
        )
    return outputs


def _crossing(parts: Sequence[ModelPart], inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors that cross each border, from the inputs to the outputs."""
    borders = [list(inputs)]
    for part in parts:
        borders.append(leaves_of(part.module(*borders[-1])))
    return borders


Flow = tuple[tuple[tuple[bool, ...], ...], ...]
"""For each part but the first, and each of its outputs: which of its inputs get a gradient from
that output."""


def find_flow(parts: Sequence[ModelPart], inputs: Sequence[Tensor], *, is_known: bool) -> Flow:
    """Find where gradients go, on an example.

    Args:
        is_known: whether it is the same for all examples; otherwise every input of a part is
            assumed to get a gradient from every output.
    """
    with torch.no_grad():
        entering = leaves_of(parts[0].module(*inputs))
    flow = []
    for part in parts[1:]:
        entering = [x.detach().requires_grad_(_has_gradient(x)) for x in entering]
        with torch.enable_grad():
            leaving = leaves_of(part.module(*entering))
        all_from_all = ((True,) * len(entering),) * len(leaving)
        flow.append(tuple(_reached(y, entering) for y in leaving) if is_known else all_from_all)
        entering = leaving
    return tuple(flow)


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _reached(output: Tensor, inputs: Sequence[Tensor]) -> tuple[bool, ...]:
    """Return which of a part's inputs get a gradient from one of its outputs."""
    leaves = [x for x in inputs if x.requires_grad]
    if not output.requires_grad or not leaves:
        return (False,) * len(inputs)
    seed = torch.zeros_like(output)
    gradients = torch.autograd.grad(output, leaves, seed, retain_graph=True, allow_unused=True)
    pairs = zip(leaves, gradients, strict=True)
    reached = {id(leaf) for leaf, gradient in pairs if gradient is not None}
    return tuple(id(x) in reached for x in inputs)


def used_tensors(
    borders: Sequence[Sequence[TensorShape]], flow: Flow, outputs: int
) -> list[list[int]]:
    """Return the numbers of those tensors of each border that get gradients.

    Args:
        outputs: which of the model's outputs have one, one bit each.
    """
    used = [[
        number for number, shape in enumerate(borders[-1])
        if shape.has_gradient and outputs >> number & 1
    ]]  # fmt: skip
    for shapes, part in zip(reversed(borders[1:-1]), reversed(flow), strict=True):
        next_used = used[0]
        used.insert(0, [
            number for number, shape in enumerate(shapes)
            if shape.has_gradient and any(part[output][number] for output in next_used)
        ])  # fmt: skip
    return [[], *used]


def shape_of(few: Tensor, more: Tensor, sizes: tuple[int, int]) -> TensorShape:
    """Return how a tensor grows with rows.

    Args:
        few, more: the tensor for each of two numbers of rows.
        sizes: these numbers.
    """
    if sizes[0] == sizes[1]:
        return TensorShape(few.dtype, tuple(few.shape), (0,) * few.ndim)
    step = sizes[1] - sizes[0]
    growing = [(b - a) // step for a, b in zip(few.shape, more.shape, strict=True)]
    fixed = [a - slope * sizes[0] for a, slope in zip(few.shape, growing, strict=True)]
    return TensorShape(few.dtype, tuple(fixed), tuple(growing))


def leaves_of(values: Any) -> list[Tensor]:
    """Return the tensors in a tree of tuples, lists and dicts."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
