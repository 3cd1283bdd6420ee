"""Make the parts of a cut: modules that run one after the other.

    part 0: (inputs)            -> (what crosses border 0)
    part k: (what crosses k-1)  -> (what crosses border k)    tensors for later parts pass through
    last:   (what crosses n-2)  -> outputs, in the model's form

Each part is an `nn.Module` over the model's own layers and parameters, under the model's own names:
the state of the model is the union of the parts' states. So a part can be given to
`torch.distributed.pipelining.PipelineStage(part.module, k, n, device)`. A module that is never
called belongs to no part.
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
        module: takes the tensors named in ``inputs``, in this order, and returns those in
            ``outputs``; the last part returns what the model returns.
        inputs, outputs: names of the tensors that cross its borders.
        parameters, buffers: the model's names for those that the part uses; a tied parameter has
            its first name in every part.
        shared: names of parameters that other parts use, too; their gradients must be added up in
            each update.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    shared: tuple[str, ...]


def make_parts(traced: TracedModel, part_of: Sequence[int]) -> tuple[ModelPart, ...]:
    """Make the module of each part of a cut.

    Args:
        part_of: part of each piece, from 0, as `partition.placement.Placement.part_of` maps them;
            no piece may need one of a later part.

    Raises:
        ConfigError: the number of pieces is wrong, or a piece needs one of a later part.
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
    parameters = [[names[id(tensor)] for tensor in part.parameters()] for part in modules]
    return tuple(
        ModelPart(
            module=part,
            inputs=tuple(node.name for node in borders[number] or ()),
            outputs=tuple(node.name for node in borders[number + 1] or ()),
            parameters=tuple(parameters[number]),
            buffers=tuple(names[id(tensor)] for tensor in part.buffers() if id(tensor) in names),
            shared=tuple(
                name
                for name in parameters[number]
                if any(name in others for i, others in enumerate(parameters) if i != number)
            ),
        )
        for number, part in enumerate(modules)
    )


def _check_order(part_of_node: Mapping[fx.Node, int]) -> None:
    for node, part in part_of_node.items():
        for needed in node.all_input_nodes:
            if part_of_node.get(needed, 0) > part:
                raise ConfigError(f"part {part} needs {needed.name} of a later part")


def _crosses(node: fx.Node, border: int, part_of_node: Mapping[fx.Node, int]) -> bool:
    """Whether a tensor is computed before a border, or is an input, and is read after it."""
    if node.op in ("get_attr", "output") or part_of_node.get(node, 0) > border:
        return False
    return any(part_of_node.get(user, border + 1) > border for user in node.users)


def _module(
    root: fx.GraphModule,
    part_of_node: Mapping[fx.Node, int],
    number: int,
    inputs: Iterable[fx.Node] | None,
    outputs: Sequence[fx.Node] | None,
) -> fx.GraphModule:
    """Make the module of a part.

    Args:
        inputs, outputs: what crosses the borders before and after it; outputs None: the model's.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs or ():
        copies[node] = graph.placeholder(node.name)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # get_attr: a parameter or buffer that is read directly
            copies[node] = graph.node_copy(node, copy_of)
        return copies[node]

    model_outputs: Any = None
    for node in root.graph.nodes:
        if part_of_node.get(node) == number:
            copies[node] = graph.node_copy(node, copy_of)
        elif node.op == "output":
            model_outputs = outputs_of(root, node)
    if outputs is None:
        graph.output(fx.map_arg(model_outputs, copy_of))
    elif len(outputs) == 1:
        graph.output(copies[outputs[0]])
    else:
        graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(root, graph)


def outputs_of(root: fx.GraphModule, node: fx.Node) -> Any:
    """Return the model's outputs in its own form; torch.export stores a flat list and its form."""
    info = getattr(root.graph._codegen, "pytree_info", None)
    spec = getattr(info, "out_spec", None)
    if spec is None:
        return node.args[0]
    return torch.utils._pytree.tree_unflatten(node.args[0], spec)  # type: ignore[arg-type]  # the output of a graph is what its spec flattens


def run_parts(parts: Sequence[ModelPart], inputs: Sequence[Tensor]) -> Any:
    """Run all parts one after the other in this process, and return the model's outputs."""
    values: Any = tuple(inputs)
    for part in parts:
        values = part.module(*values)
        if isinstance(values, torch.Tensor) and part is not parts[-1]:
            values = (values,)
    return values
