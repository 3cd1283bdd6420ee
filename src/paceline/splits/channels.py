"""Pairs of layers that can be split over channels: by what the first gives and the second takes.

              .-- first: some of its outputs --> between --> second: some of its inputs --.
    inputs ---|                                                                            + --> sum
              '-- first: the others          --> between --> second: the others -----------'

Between them may stand what treats each channel by itself and has no numbers of its own for it:
activations, dropout, pooling, a flatten; batch norm has. So nothing is sent between the two, and
one sum follows (M. Shoeybi et al., "Megatron-LM", 2019). AlexNet's two columns are such pairs. What
a layer of torch's does inside, an attention, is not looked into.
"""

from collections.abc import Sequence

from torch import fx, nn

from ..partition.graph import ChannelPair, WorkGraph
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
    """Pairs in the order of the model, none in two.

    Args:
        graph: its costs at the whole batch.
    """
    pairs: list[ChannelPair] = []
    used: set[int] = set()
    readers = {edge.source: edge for edge in graph.edges}
    for number, piece in enumerate(traced.pieces):
        if number in used or not _is_split(traced, piece):
            continue
        nodes, at = [number], number
        while (edge := readers.get(at)) is not None and len(edge.targets) == 1:
            at = edge.targets[0]
            if at == len(traced.pieces):
                break
            nodes.append(at)
            if _is_split(traced, traced.pieces[at]):
                used.update(nodes)
                pairs.append(_pair(graph, nodes))
                break
            if not _is_between(traced, traced.pieces[at]):
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
    """A layer alone, with all of its channels in one group."""
    if piece[0].op != "call_module":
        return False
    layer = traced.graph_module.get_submodule(str(piece[0].target))
    is_one = isinstance(layer, _SPLIT) and getattr(layer, "groups", 1) == 1
    return is_one and all(_passes(traced, node) for node in piece[1:])


def _is_between(traced: TracedModel, piece: Sequence[fx.Node]) -> bool:
    return all(_passes(traced, node) for node in piece)


def _passes(traced: TracedModel, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(traced.graph_module.get_submodule(str(node.target)), _BETWEEN)
    return label(node) in _FUNCTIONS
