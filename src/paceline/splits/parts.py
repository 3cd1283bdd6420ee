"""The parts of a cut as modules that run one behind the other.

    part 0: (inputs)            -> (what crosses border 0)
    part k: (what crosses k-1)  -> (what crosses border k)    what a later part reads is handed on
    last:   (what crosses n-2)  -> outputs, as the model gives them

Each part is an `nn.Module` over the model's own layers and parameters, under the model's own names:
the state of the whole is the union of the parts' states. So a part is what
`torch.distributed.pipelining.PipelineStage(part.module, k, n, device)` takes. A module that nobody
calls belongs to no part.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import ConfigError
from .tracing import TracedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One part of a cut.

    Args:
        module: takes the tensors named in ``inputs``, in this order, and gives those in
            ``outputs``; the last part gives what the model gives.
        inputs, outputs: names of what crosses its borders.
        parameters, buffers: the model's names of what it uses; a tied parameter has its first name
            in every part.
        shared: parameters that other parts use, too: their gradients are to be added up, an update.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    shared: tuple[str, ...]


def make_parts(traced: TracedModel, part_of: Sequence[int]) -> tuple[ModelPart, ...]:
    """The modules of a cut.

    Args:
        part_of: each piece's part, from 0; no piece needs one of a later part. What
            `partition.placement.Placement.part_of` says, by the pieces' numbers.

    Raises:
        ConfigError: it is of another number of pieces, or a piece needs one of a later part.
    """
    if len(part_of) != len(traced.pieces):
        raise ConfigError(f"{len(traced.pieces)} pieces need a part each, got {len(part_of)}")
    graph = traced.graph_module.graph
    part_of_node = {
        node: part for piece, part in zip(traced.pieces, part_of, strict=True) for node in piece
    }
    _check_order(part_of_node)
    num_parts = max(part_of) + 1
    live = [
        [node for node in graph.nodes if _crosses(node, border, part_of_node)]
        for border in range(num_parts - 1)
    ]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    borders = [placeholders, *live, None]
    modules = [
        _module(traced.graph_module, part_of_node, number, borders[number], borders[number + 1])
        for number in range(num_parts)
    ]
    names = traced.parameter_names()
    used = [[names[id(one)] for one in part.parameters()] for part in modules]
    return tuple(
        ModelPart(
            module=part,
            inputs=tuple(node.name for node in borders[number] or ()),
            outputs=tuple(node.name for node in borders[number + 1] or ()),
            parameters=tuple(used[number]),
            buffers=tuple(names[id(one)] for one in part.buffers() if id(one) in names),
            shared=tuple(
                name
                for name in used[number]
                if any(name in other for i, other in enumerate(used) if i != number)
            ),
        )
        for number, part in enumerate(modules)
    )


def _check_order(part_of_node: Mapping[fx.Node, int]) -> None:
    for node, part in part_of_node.items():
        for one in node.all_input_nodes:
            if part_of_node.get(one, 0) > part:
                raise ConfigError(f"part {part} needs {one.name} of a later part")


def _crosses(node: fx.Node, border: int, part_of_node: Mapping[fx.Node, int]) -> bool:
    """Whether a tensor is made up to this border, or given, and read behind it."""
    if node.op in ("get_attr", "output") or part_of_node.get(node, 0) > border:
        return False
    return any(part_of_node.get(user, border + 1) > border for user in node.users)


def _module(
    root: fx.GraphModule,
    part_of_node: Mapping[fx.Node, int],
    number: int,
    given: Iterable[fx.Node] | None,
    wanted: Sequence[fx.Node] | None,
) -> fx.GraphModule:
    """The operations of a part, with what crosses its borders as inputs and outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in given or ():
        copies[node] = graph.placeholder(node.name)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter that is read as one
            copies[node] = graph.node_copy(node, copy_of)
        return copies[node]

    result: Any = None
    for node in root.graph.nodes:
        if part_of_node.get(node) == number:
            copies[node] = graph.node_copy(node, copy_of)
        elif node.op == "output":
            result = outputs_of(root, node)
    if wanted is None:
        graph.output(fx.map_arg(result, copy_of))
    elif len(wanted) == 1:
        graph.output(copies[wanted[0]])
    else:
        graph.output(tuple(copies[node] for node in wanted))
    return fx.GraphModule(root, graph)


def outputs_of(root: fx.GraphModule, node: fx.Node) -> Any:
    """What the model gives, in its own form: torch.export has a flat row and the form beside it."""
    info = getattr(root.graph._codegen, "pytree_info", None)
    spec = getattr(info, "out_spec", None)
    if spec is None:
        return node.args[0]
    return torch.utils._pytree.tree_unflatten(node.args[0], spec)  # type: ignore[arg-type]  # the output of a graph is what its spec flattens


def run_parts(parts: Sequence[ModelPart], inputs: Sequence[Tensor]) -> Any:
    """All parts one behind the other, in this process."""
    given: Any = tuple(inputs)
    for part in parts:
        given = part.module(*given)
        if isinstance(given, torch.Tensor) and part is not parts[-1]:
            given = (given,)
    return given
