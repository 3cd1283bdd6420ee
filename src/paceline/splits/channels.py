"""Find pairs of layers that can be split over channels: outputs of the first, inputs of the second.

              .-- first: some of its outputs --> between --> second: some of its inputs --.
    inputs ---|                                                                            + --> sum
              '-- first: the others          --> between --> second: the others -----------'

Between the two may be operations that treat each channel by itself and have no parameters or
buffers per channel: activations, dropout, pooling, flatten, but not batch norm. Nothing else reads
what the first layer or they compute. So nothing is sent between the two layers, and one all-reduce
follows them (M. Shoeybi et al., "Megatron-LM", 2019). AlexNet's two columns are such pairs.
Composite layers of torch, such as attention, are not looked into.
"""

from collections.abc import Sequence

from torch import fx, nn

from ..partition.graph import ChannelPair, WorkEdge, WorkGraph
from .pieces import label
from .tracing import TracedModel

_SPLIT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BETWEEN = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh,
    nn.Hardswish, nn.Dropout, nn.Dropout2d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AdaptiveAvgPool2d, nn.Identity, nn.Flatten,
)  # fmt: skip
_FUNCTIONS = {
    "relu", "relu_", "gelu", "silu", "sigmoid", "tanh", "dropout", "max_pool2d", "avg_pool2d",
    "adaptive_avg_pool2d", "leaky_relu", ".relu", ".relu_", ".sigmoid", ".tanh",
}  # fmt: skip


def find_pairs(traced: TracedModel, graph: WorkGraph) -> tuple[ChannelPair, ...]:
    """Return disjoint pairs of layers, in the order of the model.

    Args:
        graph: the model's costs at the whole batch.
    """
    pairs: list[ChannelPair] = []
    used: set[int] = set()
    leaving: dict[int, list[WorkEdge]] = {}
    for edge in graph.edges:
        leaving.setdefault(edge.source, []).append(edge)
    for number, piece in enumerate(traced.pieces):
        if number in used or not _is_split(traced, piece):
            continue
        nodes, node = [number], number
        while len(edges := leaving.get(node, [])) == 1 and len(edges[0].targets) == 1:
            node = edges[0].targets[0]
            if node == len(traced.pieces):
                break
            nodes.append(node)
            if _is_split(traced, traced.pieces[node]):
                used.update(nodes)
                pairs.append(_pair(graph, nodes))
                break
            if not _is_between(traced, traced.pieces[node]):
                break
    return tuple(pairs)


def _pair(graph: WorkGraph, nodes: Sequence[int]) -> ChannelPair:
    entering = [edge for edge in graph.edges if nodes[0] in edge.targets]
    leaving = [edge for edge in graph.edges if edge.source == nodes[-1]]
    return ChannelPair(
        nodes=tuple(nodes),
        in_bytes=sum(edge.gradient_bytes for edge in entering),
        out_bytes=sum(edge.num_bytes for edge in leaving),
    )


def _is_split(traced: TracedModel, piece: Sequence[fx.Node]) -> bool:
    """Whether a piece begins with a layer, ungrouped, that can be split, and has no other layer."""
    if piece[0].op != "call_module":
        return False
    layer = traced.graph_module.get_submodule(str(piece[0].target))
    can_split = isinstance(layer, _SPLIT) and getattr(layer, "groups", 1) == 1
    return can_split and all(_keeps_channels(traced, node) for node in piece[1:])


def _is_between(traced: TracedModel, piece: Sequence[fx.Node]) -> bool:
    return all(_keeps_channels(traced, node) for node in piece)


def _keeps_channels(traced: TracedModel, node: fx.Node) -> bool:
    """Whether an operation treats each channel by itself and has no state per channel."""
    if node.op == "call_module":
        return isinstance(traced.graph_module.get_submodule(str(node.target)), _BETWEEN)
    return label(node) in _FUNCTIONS
