"""What is split: nodes of work in their order, edges of bytes between them, tied parameters.

        inputs --x--> [0 conv] --a--> [1 relu] --b--> [2 linear] --c--> outputs
                                         \\______________________________/
                                          one edge: its maker, and all who read it

Nodes are numbered in an order in which they can be computed, so that an edge leads from a smaller
number to larger ones; a set of nodes is a whole number with a bit for each. This module must not
know how anything was measured.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..errors import ConfigError

INPUT = -1
"""The maker of an edge that the model is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkNode:
    """What is never cut: one layer, or several that must stay together.

    Args:
        forward_s, backward_s: of one micro-batch, on a worker of speed 1, whose gradients are added
            to those of others.
        late_s: and of that micro-batch's part of what is computed at the end of an update, since
            nobody waits for it (splits/late_weights.py).
        first_s: an update's, whatever its micro-batches: room is made for its gradients.
        parameter_bytes: its own; tied ones are said once, in `TiedParameter`.
        activation_bytes: what it keeps of a micro-batch until its backward pass; late_bytes: and
            from then on, until the end of the update.
        buffer_bytes: what it holds besides.
        num_layers: in it that have parameters; the even cut counts them.
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
        """Forward and backward, late or not."""
        return self.forward_s + self.backward_s + self.late_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEdge:
    """A tensor: who makes it, and all who read it.

    Args:
        source: its maker's number, or `INPUT`.
        targets: its readers' numbers; the number of nodes stands for the model's output.
        num_bytes: of a micro-batch, forward.
        gradient_bytes: that come back; 0 for whole numbers, and for inputs.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    num_bytes: int
    gradient_bytes: int = 0

    @property
    def last(self) -> int:
        """Its last reader in the order."""
        return max(self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A parameter that several nodes use: who is cut off from the others holds a copy."""

    name: str
    num_bytes: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPair:
    """Two layers and what lies between, split over channels: one sum forward, one back.

    Args:
        nodes: their numbers, and of those between.
        in_bytes, out_bytes: of what goes in and comes out, for the whole batch.
    """

    nodes: tuple[int, ...]
    in_bytes: int
    out_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkGraph:
    """A model as it is cut.

    Args:
        nodes: in an order in which they can be computed.

    Raises:
        ConfigError: an edge leads backwards, or to a node that is none.
    """

    nodes: tuple[WorkNode, ...]
    edges: tuple[WorkEdge, ...] = ()
    ties: tuple[TiedParameter, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.nodes)
        if not size:
            raise ConfigError("a model without a single operation cannot be cut")
        for edge in self.edges:
            if not edge.targets:
                raise ConfigError(f"nobody reads {edge.name}: leave the edge out")
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
        """Of one micro-batch, forward and backward, without any transfer."""
        return sum(node.work_s for node in self.nodes)

    @property
    def alone_s(self) -> float:
        """Of an update that is one micro-batch."""
        return self.work_s + sum(node.first_s for node in self.nodes)

    @property
    def parameter_bytes(self) -> int:
        """Tied ones once."""
        own = sum(node.parameter_bytes for node in self.nodes)
        return own + sum(tie.num_bytes for tie in self.ties)

    @property
    def activation_bytes(self) -> int:
        """Of one micro-batch."""
        return sum(node.activation_bytes for node in self.nodes)

    def needs(self) -> list[int]:
        """For each node the set of nodes whose outputs it reads."""
        found = [0] * len(self.nodes)
        for edge in self.edges:
            for target in edge.targets:
                if edge.source != INPUT and target < len(found):
                    found[target] |= 1 << edge.source
        return found

    def is_chain(self) -> bool:
        """Whether each node reads the one before it, and nothing else of the model.

        Example:
            >>> chain(["a", "b"], seconds=[1.0, 2.0], num_bytes=8).is_chain()
            True
        """
        return self.needs() == [0, *(1 << i for i in range(len(self.nodes) - 1))]

    def crossing(self, border: int) -> Iterator[WorkEdge]:
        """What is live at a border: made in the set, or given, and read outside of it.

        Nothing crosses the borders of the whole: inputs and outputs stay where they are.
        """
        if border in (0, self.whole):
            return
        for edge in self.edges:
            is_made = edge.source == INPUT or border >> edge.source & 1
            if is_made and any(not border >> target & 1 for target in edge.targets):
                yield edge

    def at(
        self, batch: float, own_batch: float, other: "WorkGraph", other_batch: float
    ) -> "WorkGraph":
        """The costs of another batch, on the straight line through two that were measured.

        Args:
            own_batch, other_batch: what the costs of this graph and of the other are of.

        A time is never less than nothing, and bytes are never fewer. What comes late is computed
        once for all micro-batches: what it takes for no sample at all is an update's.
        """
        share, none = ((size - own_batch) / (other_batch - own_batch) for size in (batch, 0.0))

        def between(one: float, two: float, share: float = share) -> float:
            return max(0.0, one + share * (two - one))

        def late(one: WorkNode, two: WorkNode, share: float) -> float:
            return between(one.late_s, two.late_s, share)

        nodes = tuple(
            replace(
                one,
                forward_s=between(one.forward_s, two.forward_s),
                backward_s=between(one.backward_s, two.backward_s),
                late_s=max(0.0, late(one, two, share) - late(one, two, none)),
                first_s=between(one.first_s, two.first_s)
                + min(late(one, two, share), late(one, two, none)),
                activation_bytes=round(between(one.activation_bytes, two.activation_bytes)),
                late_bytes=round(between(one.late_bytes, two.late_bytes)),
            )
            for one, two in zip(self.nodes, other.nodes, strict=True)
        )
        edges = tuple(
            replace(
                one,
                num_bytes=round(between(one.num_bytes, two.num_bytes)),
                gradient_bytes=round(between(one.gradient_bytes, two.gradient_bytes)),
            )
            for one, two in zip(self.edges, other.edges, strict=True)
        )
        return replace(self, nodes=nodes, edges=edges)

    def scaled(self, factor: float) -> "WorkGraph":
        """This graph with all of its seconds multiplied by ``factor``."""
        nodes = tuple(
            replace(
                one, forward_s=factor * one.forward_s, backward_s=factor * one.backward_s,
                late_s=factor * one.late_s, first_s=factor * one.first_s,
            )
            for one in self.nodes
        )  # fmt: skip
        return replace(self, nodes=nodes)


def chain(
    names: Iterable[str],
    *,
    seconds: Iterable[float],
    num_bytes: int,
    parameter_bytes: int = 0,
) -> WorkGraph:
    """Layers in a row: a third of the seconds forward, two thirds backward; each output as large.

    Example:
        >>> chain(["a", "b"], seconds=[3.0, 3.0], num_bytes=8).work_s
        6.0
    """
    nodes = tuple(
        WorkNode(
            name=name, forward_s=took / 3, backward_s=2 * took / 3, parameter_bytes=parameter_bytes
        )
        for name, took in zip(names, seconds, strict=True)
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
