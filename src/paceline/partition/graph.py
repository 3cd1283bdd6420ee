"""Represent a model to be split: nodes of work in order, edges of bytes, tied parameters.

        inputs --x--> [0 conv] --a--> [1 relu] --b--> [2 linear] --c--> outputs
                                         \\______________________________/
                                          one edge: its source, and all its targets

Nodes are numbered in an order in which they can be computed, so an edge leads from a smaller
number to larger ones. A set of nodes is an integer with a bit for each node. This module must not
know how anything was measured.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..errors import ConfigError

INPUT = -1
"""The source of an edge that is an input of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkNode:
    """A unit of work that is never cut: one layer, or several that must stay together.

    Args:
        forward_s, backward_s: of one micro-batch, on a worker of speed 1, whose gradients are added
            to those of earlier micro-batches.
        late_s: of one micro-batch's share of the work put off to the end of an update because
            no other part waits for it (splits/late_weights.py).
        first_s: once per update, however many micro-batches it has: memory for the gradients is
            allocated.
        parameter_bytes: without tied parameters, which are listed in `TiedParameter`.
        activation_bytes: kept for one micro-batch until its backward pass.
        late_bytes: kept for one micro-batch from its backward pass to the end of the update.
        buffer_bytes: of the node's buffers.
        num_layers: layers in the node that have parameters; the even cut counts them.
    """

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    late_s: float = 0.0
    first_s: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    late_bytes: int = 0
    buffer_bytes: int = 0
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__[1:]:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} of {self.name} must be >= 0 and finite, got {value}")

    @property
    def work_s(self) -> float:
        """Seconds of one micro-batch, forward and backward, late work included."""
        return self.forward_s + self.backward_s + self.late_s

    @property
    def late_gradient_bytes(self) -> int:
        """Of its gradients, if they are computed late: held once more while they are added."""
        return self.parameter_bytes if self.late_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEdge:
    """A tensor: the node that computes it, and the nodes that read it.

    Args:
        source: number of the node that computes it, or `INPUT`.
        targets: numbers of the nodes that read it; ``len(graph)`` stands for the model's output.
        num_bytes: of a micro-batch, forward.
        gradient_bytes: of its gradient; 0 for integer tensors and for inputs.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    num_bytes: int
    gradient_bytes: int = 0

    @property
    def last(self) -> int:
        """The last target in the order of nodes."""
        return max(self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A parameter that several nodes use; each part with some of these nodes holds a copy."""

    name: str
    num_bytes: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPair:
    """Two layers and what lies between, split over channels: one all-reduce forward, one back.

    Args:
        nodes: numbers of both layers and of the nodes between.
        in_bytes, out_bytes: of the pair's input and output, for the whole batch.
    """

    nodes: tuple[int, ...]
    in_bytes: int
    out_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkGraph:
    """A model as a graph that can be cut.

    Args:
        nodes: in an order in which they can be computed.

    Raises:
        ConfigError: an edge leads backwards, or to a node that does not exist.
    """

    nodes: tuple[WorkNode, ...]
    edges: tuple[WorkEdge, ...] = ()
    ties: tuple[TiedParameter, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.nodes)
        if not size:
            raise ConfigError("a model without operations cannot be cut")
        for edge in self.edges:
            if not edge.targets:
                raise ConfigError(f"no node reads {edge.name}: leave the edge out")
            if not INPUT <= edge.source < min(edge.targets) or edge.last > size:
                raise ConfigError(
                    f"edge {edge.name} leads from node {edge.source} to {edge.targets}, of "
                    f"{size}: number nodes in the order in which they are computed"
                )
        for tie in self.ties:
            if len(set(tie.nodes)) < 2 or not all(0 <= node < size for node in tie.nodes):
                raise ConfigError(f"{tie.name} is tied between nodes {tie.nodes}: name two or more")

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def whole(self) -> int:
        """The set of all nodes."""
        return (1 << len(self.nodes)) - 1

    @property
    def work_s(self) -> float:
        """Seconds to compute one micro-batch, forward and backward, without any transfer."""
        return sum(node.work_s for node in self.nodes)

    @property
    def alone_s(self) -> float:
        """Seconds to compute an update of a single micro-batch."""
        return self.work_s + sum(node.first_s for node in self.nodes)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters; tied ones count once."""
        untied = sum(node.parameter_bytes for node in self.nodes)
        return untied + sum(tie.num_bytes for tie in self.ties)

    @property
    def activation_bytes(self) -> int:
        """Bytes kept for the backward pass of one micro-batch."""
        return sum(node.activation_bytes for node in self.nodes)

    def needs(self) -> list[int]:
        """Return, for each node, the set of nodes whose outputs it reads."""
        needs = [0] * len(self.nodes)
        for edge in self.edges:
            for target in edge.targets:
                if edge.source != INPUT and target < len(needs):
                    needs[target] |= 1 << edge.source
        return needs

    def is_chain(self) -> bool:
        """Whether each node reads the one before it, and nothing else of the model.

        Example:
            >>> chain(["a", "b"], seconds=[1.0, 2.0], num_bytes=8).is_chain()
            True
        """
        return self.needs() == [0, *(1 << i for i in range(len(self.nodes) - 1))]

    def crossing(self, border: int) -> Iterator[WorkEdge]:
        """Yield the edges that are live at a border: from inside it or an input, read outside.

        Nothing crosses the two ends of the model: inputs and outputs stay where they are.
        """
        if border in (0, self.whole):
            return
        for edge in self.edges:
            is_made = edge.source == INPUT or border >> edge.source & 1
            if is_made and any(not border >> target & 1 for target in edge.targets):
                yield edge

    def at(
        self, batch: float, this_batch: float, other: "WorkGraph", other_batch: float
    ) -> "WorkGraph":
        """Estimate the costs at a batch size, on the line through two measured ones.

        Args:
            this_batch, other_batch: batch sizes that this graph and the other were measured at.

        Results are never negative. Late work is computed once for all micro-batches: the line's
        value at a batch of 0 is a cost per update.
        """
        batch_x, zero_x = ((x - this_batch) / (other_batch - this_batch) for x in (batch, 0.0))

        def line(value: float, other_value: float, x: float = batch_x) -> float:
            return max(0.0, value + x * (other_value - value))

        def late(node: WorkNode, twin: WorkNode, x: float) -> float:
            return line(node.late_s, twin.late_s, x)

        nodes = tuple(
            replace(
                node,
                forward_s=line(node.forward_s, twin.forward_s),
                backward_s=line(node.backward_s, twin.backward_s),
                late_s=max(0.0, late(node, twin, batch_x) - late(node, twin, zero_x)),
                first_s=line(node.first_s, twin.first_s)
                + min(late(node, twin, batch_x), late(node, twin, zero_x)),
                activation_bytes=round(line(node.activation_bytes, twin.activation_bytes)),
                late_bytes=round(line(node.late_bytes, twin.late_bytes)),
            )
            for node, twin in zip(self.nodes, other.nodes, strict=True)
        )
        edges = tuple(
            replace(
                edge,
                num_bytes=round(line(edge.num_bytes, twin.num_bytes)),
                gradient_bytes=round(line(edge.gradient_bytes, twin.gradient_bytes)),
            )
            for edge, twin in zip(self.edges, other.edges, strict=True)
        )
        return replace(self, nodes=nodes, edges=edges)

    def without_costs(self) -> "WorkGraph":
        """Return this graph as it would be measured at a batch of no samples."""
        edges = tuple(replace(edge, num_bytes=0, gradient_bytes=0) for edge in self.edges)
        return replace(self, nodes=tuple(WorkNode(name=n.name) for n in self.nodes), edges=edges)

    def scaled(self, factor: float) -> "WorkGraph":
        """Return this graph with all seconds multiplied by a factor."""
        nodes = tuple(
            replace(
                node, forward_s=factor * node.forward_s, backward_s=factor * node.backward_s,
                late_s=factor * node.late_s, first_s=factor * node.first_s,
            )
            for node in self.nodes
        )  # fmt: skip
        return replace(self, nodes=nodes)


def chain(
    names: Iterable[str],
    *,
    seconds: Iterable[float],
    num_bytes: int,
    parameter_bytes: int = 0,
) -> WorkGraph:
    """Build a graph of layers in a row.

    Args:
        seconds: of each layer, a third of them forward, two thirds backward.
        num_bytes: of each layer's output, and of the input.
        parameter_bytes: of each layer.

    Example:
        >>> chain(["a", "b"], seconds=[3.0, 3.0], num_bytes=8).work_s
        6.0
    """
    nodes = tuple(
        WorkNode(
            name=name,
            forward_s=layer_s / 3,
            backward_s=2 * layer_s / 3,
            parameter_bytes=parameter_bytes,
        )
        for name, layer_s in zip(names, seconds, strict=True)
    )
    edges = tuple(
        WorkEdge(
            name=f"{nodes[i].name if i >= 0 else 'inputs'}.out",
            source=i,
            targets=(i + 1,),
            num_bytes=num_bytes,
            gradient_bytes=num_bytes if i >= 0 else 0,
        )
        for i in range(-1, len(nodes))
    )
    return WorkGraph(nodes=nodes, edges=edges)
