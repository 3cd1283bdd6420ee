"""Measure the time and memory of each piece of a model on this machine, as a graph of work.

    for each piece, in order:   inputs -> forward -> outputs        seconds, bytes kept
                                gradients <- backward <- ones       seconds

Pieces run one at a time, on the tensors that they get in the model, so the overhead of Python is
measured with each of them. The whole model is therefore measured, too, and the pieces' times are
scaled to sum to its own. All of this is done in a few rounds, of which each time is the median: a
machine that is slow for a moment is slow to all pieces of one round, and not to one piece in all.
Measurements that are compared, as at two batches, take turns, round by round. Bytes kept for the
backward pass are counted by storage, each once, without parameters and buffers; a tensor between
two pieces counts for the piece that computes it. Above 300 lines, since the measurement and the
graph made from it are read together.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..errors import ConfigError
from ..partition.graph import INPUT, TiedParameter, WorkEdge, WorkGraph, WorkNode
from .clocks import CountedClock, TakenTimes, TimedClock, median_times, tensors_in
from .late_weights import LateWeights
from .pieces import place
from .tracing import TracedModel, untouched

ROUNDS = 3
"""Rounds of a measurement, each of which gets its share of the clock's runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A model's graph of work, and the time of the whole model.

    Args:
        graph: costs at this batch size.
        forward_s, backward_s: of the whole model, as an update of its own.
        is_counted: whether times are counted operations over this machine's peak rates, because the
            model is on the meta device and cannot be timed.
    """

    graph: WorkGraph
    batch_size: int
    forward_s: float
    backward_s: float
    is_counted: bool


def measure(traced: TracedModel, inputs: Sequence[Tensor]) -> MeasuredModel:
    """Run every piece forward and backward, and return the model's costs.

    Args:
        inputs: as the model was traced with, except for the size of the batch, their first axis.

    Raises:
        ConfigError: the model has no operations.
    """
    (result,) = measure_in_turns([Measurement(traced, inputs)])
    return result


def measure_in_turns(measurements: "Sequence[Measurement]") -> list[MeasuredModel]:
    """Return the costs of several, of which each has its turn in every round."""
    for _ in range(ROUNDS):
        for measurement in measurements:
            measurement.add_round()
    return [measurement.result() for measurement in measurements]


class Measurement:
    """Measures the costs of a model at one batch, round by round.

    Args:
        inputs: as the model was traced with, except for the size of the batch, their first axis.

    Raises:
        ConfigError: the model has no operations.
    """

    _first: "_Walk"

    def __init__(self, traced: TracedModel, inputs: Sequence[Tensor]) -> None:
        if not traced.pieces:
            raise ConfigError("a model without operations cannot be cut")
        self.traced, self._inputs, self.batch_size = traced, inputs, len(inputs[0])
        tensors = (*inputs, *traced.module.parameters())
        self._is_counted = any(tensor.is_meta for tensor in tensors)
        self._clock = CountedClock() if self._is_counted else TimedClock(ROUNDS)
        self._late, self._rounds = LateWeights([traced.module]), list[_Round]()

    def add_round(self) -> None:
        """Measure once more; operations are counted only once."""
        if self._is_counted and self._rounds:
            return
        model, inputs = self.traced.module, self._inputs
        with untouched(model), torch.random.fork_rng(devices=[]):
            walk = _Walk(self.traced, self._clock, counts_kept=not self._rounds)
            walk.run(*inputs)
            whole = self._clock.both(lambda: model(*inputs), model, self._late)
        if not self._rounds:
            self._first = walk
        self._rounds.append(_Round.of(whole, [cost.times for cost in walk.costs]))

    @property
    def rounds_s(self) -> list[float]:
        """Seconds of the whole model in each round so far."""
        return [sum(measured.whole) for measured in self._rounds]

    def result(self) -> MeasuredModel:
        """Return the medians of all rounds, of which there is at least one."""
        medians = _Round.median_of(self._rounds)
        whole = medians.whole
        return MeasuredModel(
            graph=_graph(self.traced, self._first, medians.pieces), batch_size=self.batch_size,
            forward_s=whole.forward_s, backward_s=whole.backward_s + whole.first_s + whole.late_s,
            is_counted=self._is_counted,
        )  # fmt: skip


class _Round(NamedTuple):
    """One run of all pieces and of the whole model.

    Attributes:
        pieces: the times of each, scaled to add up to those of the whole, whose memory is in no
            cache.
    """

    whole: TakenTimes
    pieces: list[TakenTimes]

    @classmethod
    def of(cls, whole: TakenTimes, pieces: Sequence[TakenTimes]) -> "_Round":
        forward_s, backward_s, first_s, late_s = map(sum, zip(*pieces, strict=True))
        forward = whole.forward_s / (forward_s or 1.0)
        backward = (whole.backward_s + whole.first_s) / (backward_s + first_s or 1.0)
        late = whole.late_s / (late_s or 1.0)
        scaled = [
            TakenTimes(
                piece.forward_s * forward,
                piece.backward_s * backward,
                piece.first_s * backward,
                piece.late_s * late,
            )
            for piece in pieces
        ]
        return cls(whole, scaled)

    @classmethod
    def median_of(cls, rounds: "Sequence[_Round]") -> "_Round":
        """Return the medians of all times, whose pieces add up to the whole again."""
        pieces = zip(*(measured.pieces for measured in rounds), strict=True)
        return cls.of(
            median_times([measured.whole for measured in rounds]),
            [median_times(times) for times in pieces],
        )


class _Piece(nn.Module):
    """The parameters of a piece, so that their gradients can be cleared."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PieceCost:
    """The cost of one piece.

    Args:
        kept_bytes: kept for the backward pass, without tensors that flow between pieces.
        late_bytes: kept for late gradients.
        parameters: that the piece trains.
    """

    times: TakenTimes
    kept_bytes: int
    late_bytes: int
    parameters: tuple[nn.Parameter, ...]


class _Walk(fx.Interpreter):
    """Run piece after piece, each on copies of its inputs, and collect their costs.

    Args:
        counts_kept: whether to count the bytes kept, which takes one more forward pass.

    Attributes:
        bytes_of: bytes of each node's value.
        flows_back: nodes whose value gets a gradient.
        is_kept: nodes whose value is kept for a backward pass.
    """

    def __init__(
        self, traced: TracedModel, clock: TimedClock | CountedClock, *, counts_kept: bool
    ) -> None:
        super().__init__(traced.graph_module)
        self._traced, self._clock, self._counts_kept = traced, clock, counts_kept
        held = (*traced.graph_module.parameters(), *traced.graph_module.buffers())
        self._held_storages = {_storage(tensor) for tensor in held}
        self.costs: list[_PieceCost] = []
        self.bytes_of: dict[fx.Node, int] = {}
        self.flows_back: set[fx.Node] = set()
        self.is_kept: set[fx.Node] = set()

    def run(self, *inputs: Any, **_: Any) -> Any:
        graph = self._traced.graph_module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for node, value in itertools.zip_longest(placeholders, inputs):
            self.env[node] = value
            self._count_bytes(node, value)
        index = {node: number for number, node in enumerate(graph.nodes)}
        last_readers = self._last_readers()
        for number, piece in enumerate(self._traced.pieces):
            self._run_piece(sorted(piece, key=index.__getitem__))
            for node in [node for node in self.env if last_readers.get(node, -1) == number]:
                del self.env[node]
        return None

    def _last_readers(self) -> dict[fx.Node, int]:
        """Return the number of the piece after which each node's value can be freed."""
        piece_of, last_readers = self._traced.piece_of(), {}
        for node in self._traced.graph_module.graph.nodes:
            if node.op != "get_attr" and node.op != "output":
                readers = [piece_of[user] for user in node.users if user in piece_of]
                source = piece_of.get(node, -1)
                last_readers[node] = max([source, *readers])
        return last_readers

    def _run_piece(self, piece: Sequence[fx.Node]) -> None:
        inside = set(piece)
        sources = {
            source for node in piece for source in node.all_input_nodes if source not in inside
        }
        attributes = {node for node in sources if node.op == "get_attr"}
        for node in attributes:
            self.env[node] = self.fetch_attr(str(node.target))
        parameters = self._parameters(piece, attributes)
        inputs = {node: self.env[node] for node in sources - attributes}
        results: dict[fx.Node, Any] = {}
        leaving = [node for node in piece if any(user not in inside for user in node.users)]

        def forward() -> list[Any]:
            for node, value in inputs.items():
                self.env[node] = self._copy(node, value)
            for node in piece:
                self.env[node] = results[node] = super(_Walk, self).run_node(node)
            return [results[node] for node in leaving]

        kept_bytes = self._kept_bytes(forward, [*inputs, *leaving]) if self._counts_kept else 0
        late = LateWeights([
            self.fetch_attr(str(node.target)) for node in piece if node.op == "call_module"
        ])  # fmt: skip
        times = self._clock.both(forward, _Piece(parameters), late)
        for node in piece:
            value = self.env[node] = _detached(results[node])
            self._count_bytes(node, value)
            if any(tensor.requires_grad for tensor in tensors_in(results[node])):
                self.flows_back.add(node)
        for node, value in inputs.items():
            self.env[node] = value
        self.costs.append(
            _PieceCost(
                times=times, kept_bytes=kept_bytes, late_bytes=late.num_bytes,
                parameters=tuple(parameters),
            )
        )  # fmt: skip

    def _copy(self, node: fx.Node, value: Any) -> Any:
        """Return a copy of a node's value, which a piece may change in place."""

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if node in self.flows_back and (leaf.is_floating_point() or leaf.is_complex()):
                leaf = leaf.detach().requires_grad_()
            return leaf.clone()

        return torch.utils._pytree.tree_map(copy, value)

    def _parameters(self, piece: Sequence[fx.Node], attributes: set[fx.Node]) -> list[nn.Parameter]:
        """Return the trained parameters of a piece: of its layers, and of attributes it reads."""
        tensors = [self.env[node] for node in attributes]
        for node in piece:
            if node.op == "call_module":
                tensors += self.fetch_attr(str(node.target)).parameters()
        trained = {
            id(tensor): tensor
            for tensor in tensors
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }
        return list(trained.values())

    def _kept_bytes(self, forward: Callable[[], list[Any]], flowing: Sequence[fx.Node]) -> int:
        """Return the bytes that a forward pass keeps, without parameters, buffers and tensors
        between pieces.

        Nodes of tensors between pieces are added to `is_kept` instead.

        Args:
            flowing: nodes whose values enter or leave the piece.
        """
        kept: dict[int, int] = {}
        alive: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            alive.append(tensor)
            if _storage(tensor) not in self._held_storages:
                kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # an output that it saves would keep its own graph

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = forward()
        for node in flowing:
            for tensor in tensors_in(self.env[node]):
                if kept.pop(_storage(tensor), 0):
                    self.is_kept.add(node)
        del outputs
        alive.clear()  # the graphs of these refer to them by `pack`, which no collector sees
        return sum(kept.values())

    def untrained_of(self, piece: Sequence[fx.Node]) -> dict[int, Tensor]:
        """Return the buffers and the untrained parameters that a piece reads, by their ``id``."""
        tensors: list[Any] = []
        for node in piece:
            if node.op == "call_module":
                module = self.fetch_attr(str(node.target))
                tensors += [*module.buffers(), *module.parameters()]
            sources = (source for source in node.all_input_nodes if source.op == "get_attr")
            tensors += [self.fetch_attr(str(source.target)) for source in sources]
        return {
            id(tensor): tensor
            for tensor in tensors
            if isinstance(tensor, Tensor) and not tensor.requires_grad
        }

    def _count_bytes(self, node: fx.Node, value: Any) -> None:
        self.bytes_of[node] = sum(tensor.nbytes for tensor in tensors_in(value))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _detached(values: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, values
    )


# -- the graph -------------------------------------------------------------------------------------


def _graph(traced: TracedModel, walk: _Walk, times: Sequence[TakenTimes]) -> WorkGraph:
    """Make the graph of a walk's costs, with these times of its pieces."""
    names, users = traced.parameter_names(), dict[int, list[int]]()
    for number, cost in enumerate(walk.costs):
        for parameter in cost.parameters:
            users.setdefault(id(parameter), []).append(number)
    sizes = {id(parameter): parameter.nbytes for parameter in traced.module.parameters()}
    kept_outputs = dict.fromkeys(range(len(traced.pieces)), 0)
    edges = list(_edges(traced, walk))
    for node, edge in edges:
        if node in walk.is_kept:
            keeper = edge.source if edge.source != INPUT else min(edge.targets)
            kept_outputs[keeper] += edge.num_bytes
    nodes = tuple(
        WorkNode(
            name=_name(piece),
            forward_s=taken.forward_s,
            backward_s=taken.backward_s,
            late_s=taken.late_s,
            first_s=taken.first_s,
            parameter_bytes=sum(p.nbytes for p in cost.parameters if len(users[id(p)]) == 1),
            activation_bytes=cost.kept_bytes + kept_outputs[number],
            late_bytes=cost.late_bytes,
            buffer_bytes=buffer_bytes,
            num_layers=sum(
                any(True for _ in traced.graph_module.get_submodule(str(node.target)).parameters())
                for node in piece
                if node.op == "call_module"
            )
            or int(any(len(users[id(p)]) == 1 for p in cost.parameters)),
        )
        for number, (piece, cost, taken, buffer_bytes) in enumerate(
            zip(traced.pieces, walk.costs, times, _buffer_bytes(traced, walk), strict=True)
        )
    )
    ties = tuple(
        TiedParameter(name=names[key], num_bytes=sizes[key], nodes=tuple(pieces))
        for key, pieces in users.items()
        if len(pieces) > 1
    )
    return WorkGraph(nodes=nodes, edges=tuple(edge for _, edge in edges), ties=ties)


def _edges(traced: TracedModel, walk: _Walk) -> Iterator[tuple[fx.Node, WorkEdge]]:
    """Yield each node whose value another piece reads or the model returns, with its edge."""
    piece_of, end = traced.piece_of(), len(traced.pieces)
    for node in traced.graph_module.graph.nodes:
        if node.op in ("get_attr", "output") or not walk.bytes_of.get(node):
            continue
        source = piece_of.get(node, INPUT)
        targets = {piece_of.get(user, end) for user in node.users} - {source}
        if targets:
            num_bytes = walk.bytes_of[node]
            yield (
                node,
                WorkEdge(
                    name=node.name, source=source, targets=tuple(sorted(targets)),
                    num_bytes=num_bytes,
                    gradient_bytes=num_bytes if node in walk.flows_back else 0,
                ),
            )  # fmt: skip


def _name(piece: Sequence[fx.Node]) -> str:
    """Return the name of a piece: its first and last layer, or operation if it has no layers."""
    layers = [place(node) for node in piece if node.op == "call_module"]
    names = list(dict.fromkeys(layers or [place(node) for node in piece]))
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _buffer_bytes(traced: TracedModel, walk: _Walk) -> list[int]:
    """Return each piece's bytes of buffers and untrained parameters; the first reader's count."""
    counted, sizes = set[int](), list[int]()
    for piece in traced.pieces:
        tensors = walk.untrained_of(piece)
        sizes.append(sum(tensors[key].nbytes for key in tensors.keys() - counted))
        counted |= tensors.keys()
    return sizes
