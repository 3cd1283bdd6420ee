"""What each piece of a model takes and keeps on this machine: a graph of work.

    for each piece, in their order:   inputs -> forward -> outputs        seconds, what is kept
                                      gradients <- backward <- ones       seconds

Pieces run alone, on the tensors that they would be given, so what Python needs around each of them
is measured many times over. The whole model is therefore measured, too, and all pieces' times are
scaled to sum to its own. What a piece keeps for the backward pass is counted by memory, each once,
parameters left out; a tensor between two pieces counts with its maker. A bit above 300 lines, since
what is measured and the graph that it becomes are read together.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..partition.graph import INPUT, TiedParameter, WorkEdge, WorkGraph, WorkNode
from .clocks import CountedClock, TakenTimes, TimedClock, tensors_in
from .late_weights import LateWeights
from .pieces import place
from .tracing import TracedModel, untouched


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A model's graph, and what it takes as one.

    Args:
        graph: of this batch.
        forward_s, backward_s: of the whole, measured as one, as an update of its own.
        is_counted: nothing was measured but what this machine reaches: the model has no numbers.
    """

    graph: WorkGraph
    batch_size: int
    forward_s: float
    backward_s: float
    is_counted: bool


def measure(traced: TracedModel, inputs: Sequence[Tensor]) -> MeasuredModel:
    """Runs every piece forward and backward, on these inputs.

    Args:
        inputs: the batch first; of what the model was traced with only the batch may differ.
    """
    is_counted = any(one.is_meta for one in (*inputs, *traced.module.parameters()))
    clock = CountedClock() if is_counted else TimedClock()
    with untouched(traced.module), torch.random.fork_rng(devices=[]):
        walk = _Walk(traced, clock)
        walk.run(*inputs)
        late = LateWeights([traced.module])
        whole = clock.both(lambda: traced.module(*inputs), traced.module, late)
    scales = _Scales.of(whole, [one.taken for one in walk.costs])
    return MeasuredModel(
        graph=_graph(traced, walk, scales), batch_size=len(inputs[0]), forward_s=whole.forward_s,
        backward_s=whole.backward_s + whole.first_s + whole.late_s, is_counted=is_counted,
    )  # fmt: skip


class _Scales(NamedTuple):
    """How many times as long pieces take in the whole, whose memory is in no cache."""

    forward: float
    backward: float
    late: float

    @classmethod
    def of(cls, whole: TakenTimes, pieces: Sequence[TakenTimes]) -> "_Scales":
        forward_s, backward_s, first_s, late_s = map(sum, zip(*pieces, strict=True))
        return cls(
            whole.forward_s / (forward_s or 1.0),
            (whole.backward_s + whole.first_s) / (backward_s + first_s or 1.0),
            whole.late_s / (late_s or 1.0),
        )


class _Piece(nn.Module):
    """The parameters of a piece, so that their gradients can be cleared."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.own = nn.ParameterList(parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PieceCost:
    taken: TakenTimes
    kept_bytes: int  # besides what other pieces make
    late_bytes: int
    parameters: tuple[nn.Parameter, ...]


class _Walk(fx.Interpreter):
    """Runs piece after piece, each on tensors of its own."""

    def __init__(self, traced: TracedModel, clock: TimedClock | CountedClock) -> None:
        super().__init__(traced.graph_module)
        self._traced, self._clock = traced, clock
        self.costs: list[_PieceCost] = []
        self.bytes_of: dict[fx.Node, int] = {}
        self.flows_back: set[fx.Node] = set()
        self.is_kept: set[fx.Node] = set()

    def run(self, *inputs: Any, **_: Any) -> Any:
        graph = self._traced.graph_module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for node, value in itertools.zip_longest(placeholders, inputs):
            self.env[node] = value
            self._note(node, value)
        place = {node: number for number, node in enumerate(graph.nodes)}
        last = self._last_readers()
        for number, piece in enumerate(self._traced.pieces):
            self._run_piece(sorted(piece, key=place.__getitem__))
            for node in [one for one in self.env if last.get(one, -1) == number]:
                del self.env[node]
        return None

    def _last_readers(self) -> dict[fx.Node, int]:
        """After which piece a value can be let go."""
        piece_of, last = self._traced.piece_of(), {}
        for node in self._traced.graph_module.graph.nodes:
            if node.op != "get_attr" and node.op != "output":
                readers = [piece_of[user] for user in node.users if user in piece_of]
                own = piece_of.get(node, -1)
                last[node] = max([own, *readers])
        return last

    def _run_piece(self, piece: Sequence[fx.Node]) -> None:
        inside = set(piece)
        given = {one for node in piece for one in node.all_input_nodes if one not in inside}
        read = {node for node in given if node.op == "get_attr"}
        for node in read:
            self.env[node] = self.fetch_attr(str(node.target))
        parameters = self._parameters(piece, read)
        values = {node: self.env[node] for node in given - read}
        made: dict[fx.Node, Any] = {}
        leaving = [node for node in piece if any(one not in inside for one in node.users)]

        def forward() -> list[Any]:
            for node, value in values.items():
                self.env[node] = self._own(node, value)
            for node in piece:
                self.env[node] = made[node] = super(_Walk, self).run_node(node)
            return [made[node] for node in leaving]

        kept_bytes = self._kept(forward, [*values, *leaving], parameters)
        late = LateWeights([
            self.fetch_attr(str(node.target)) for node in piece if node.op == "call_module"
        ])  # fmt: skip
        taken = self._clock.both(forward, _Piece(parameters), late)
        for node in piece:
            value = self.env[node] = _detached(made[node])
            self._note(node, value)
            if any(one.requires_grad for one in tensors_in(made[node])):
                self.flows_back.add(node)
        for node, value in values.items():
            self.env[node] = value
        self.costs.append(
            _PieceCost(
                taken=taken, kept_bytes=kept_bytes, late_bytes=late.num_bytes,
                parameters=tuple(parameters),
            )
        )  # fmt: skip

    def _own(self, node: fx.Node, value: Any) -> Any:
        """What a piece is given: a tensor that it may change in place."""

        def one(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            if node in self.flows_back and (tensor.is_floating_point() or tensor.is_complex()):
                tensor = tensor.detach().requires_grad_()
            return tensor.clone()

        return torch.utils._pytree.tree_map(one, value)

    def _parameters(self, piece: Sequence[fx.Node], read: set[fx.Node]) -> list[nn.Parameter]:
        found = [self.env[node] for node in read]
        for node in piece:
            if node.op == "call_module":
                found += self.fetch_attr(str(node.target)).parameters()
        seen = {
            id(one): one for one in found if isinstance(one, nn.Parameter) and one.requires_grad
        }
        return list(seen.values())

    def _kept(
        self,
        forward: Callable[[], list[Any]],
        flowing: Sequence[fx.Node],
        parameters: list[nn.Parameter],
    ) -> int:
        """Bytes that a forward pass leaves; what flows between pieces is noted instead."""
        not_ours = {_memory(one) for one in parameters}
        kept: dict[int, int] = {}
        alive: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            alive.append(tensor)
            if _memory(tensor) not in not_ours:
                kept[_memory(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = forward()
        for node in flowing:
            for one in tensors_in(self.env[node]):
                if kept.pop(_memory(one), 0):
                    self.is_kept.add(node)
        del outputs
        return sum(kept.values())

    def _note(self, node: fx.Node, value: Any) -> None:
        self.bytes_of[node] = sum(one.nbytes for one in tensors_in(value))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _detached(values: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda one: one.detach() if isinstance(one, Tensor) else one, values
    )


# -- the graph -------------------------------------------------------------------------------------


def _graph(traced: TracedModel, walk: _Walk, scales: _Scales) -> WorkGraph:
    """What was found, with times scaled."""
    names, users = traced.parameter_names(), dict[int, list[int]]()
    for number, cost in enumerate(walk.costs):
        for parameter in cost.parameters:
            users.setdefault(id(parameter), []).append(number)
    sizes = {id(one): one.nbytes for one in traced.module.parameters()}
    kept = dict.fromkeys(range(len(traced.pieces)), 0)
    edges = list(_edges(traced, walk))
    for node, edge in edges:
        if node in walk.is_kept:
            kept[edge.source if edge.source != INPUT else min(edge.targets)] += edge.num_bytes
    nodes = tuple(
        WorkNode(
            name=_name(piece),
            forward_s=cost.taken.forward_s * scales.forward,
            backward_s=cost.taken.backward_s * scales.backward,
            late_s=cost.taken.late_s * scales.late,
            first_s=cost.taken.first_s * scales.backward,
            parameter_bytes=sum(one.nbytes for one in cost.parameters if len(users[id(one)]) == 1),
            activation_bytes=cost.kept_bytes + kept[number],
            late_bytes=cost.late_bytes,
            buffer_bytes=_buffer_bytes(traced, piece),
            num_layers=sum(
                any(True for _ in traced.graph_module.get_submodule(str(node.target)).parameters())
                for node in piece
                if node.op == "call_module"
            )
            or int(any(len(users[id(one)]) == 1 for one in cost.parameters)),
        )
        for number, (piece, cost) in enumerate(zip(traced.pieces, walk.costs, strict=True))
    )
    ties = tuple(
        TiedParameter(name=names[key], num_bytes=sizes[key], nodes=tuple(who))
        for key, who in users.items()
        if len(who) > 1
    )
    return WorkGraph(nodes=nodes, edges=tuple(edge for _, edge in edges), ties=ties)


def _edges(traced: TracedModel, walk: _Walk) -> Iterator[tuple[fx.Node, WorkEdge]]:
    """A tensor that another piece reads, or that the model gives."""
    piece_of, end = traced.piece_of(), len(traced.pieces)
    for node in traced.graph_module.graph.nodes:
        if node.op in ("get_attr", "output") or not walk.bytes_of.get(node):
            continue
        own = piece_of.get(node, INPUT)
        targets = {piece_of.get(user, end) for user in node.users} - {own}
        if targets:
            num_bytes = walk.bytes_of[node]
            yield (
                node,
                WorkEdge(
                    name=node.name, source=own, targets=tuple(sorted(targets)),
                    num_bytes=num_bytes,
                    gradient_bytes=num_bytes if node in walk.flows_back else 0,
                ),
            )  # fmt: skip


def _name(piece: Sequence[fx.Node]) -> str:
    """Its layers; where it has none, its operations."""
    layers = [place(node) for node in piece if node.op == "call_module"]
    names = list(dict.fromkeys(layers or [place(node) for node in piece]))
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _buffer_bytes(traced: TracedModel, piece: Sequence[fx.Node]) -> int:
    """What it holds besides: buffers, and parameters that are not trained."""
    called = {str(node.target) for node in piece if node.op == "call_module"}
    modules = [traced.graph_module.get_submodule(name) for name in called]
    frozen = (one for module in modules for one in module.parameters() if not one.requires_grad)
    buffers = (one for module in modules for one in module.buffers())
    return sum(one.nbytes for one in (*buffers, *frozen))
