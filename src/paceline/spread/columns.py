"""Divide the channels of pairs of layers over the workers of a copy, and run them.

             .-- worker 0   first: some outputs -- between -- second: some inputs --.
    x, all --|                                                                      |-- sum, + bias
             '-- worker 1   first: the others   -- between -- second: the others ---'

    forward    x is on all workers             the sum is an all-reduce
    backward   its gradient is an all-reduce   the sum's gradient is on all workers

The pairs are found by splits/channels.py and proved here, each on an example: the outputs of all
workers add up to the output of the two layers. AlexNet's two columns are such pairs (A. Krizhevsky
et al., "ImageNet Classification with Deep Convolutional Neural Networks", 2012; M. Shoeybi et al.,
"Megatron-LM", 2019, section 3, for f and g, here `_Enter` and `_Sum`). Above 300 lines, since the
proof uses what is run. This module must not know batches or optimizers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..exchange.group import Made, MemberGroup
from ..partition.graph import ChannelPair, WorkGraph
from ..splits.channels import find_pairs
from ..splits.parts import make_parts
from ..splits.tracing import TracedModel, untouched
from .modes import modes_kept

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CLOSE = 1e-4
_VECTOR = 16
"""Channels that a convolution computes at once: 22 take as long as 32. For a linear layer, 1."""
_GROWN = 1.15
"""The largest share of whole vectors is smaller than this, relative to an even one."""
_STRIDE = 0x9E3779B97F4A7C15
"""Distance between the seeds of workers: 2 ** 64 over the golden ratio, as in splitmix64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPair:
    """Two layers and what lies between, as operations.

    Args:
        first, second: the calls of the layers.
        inside: operations from the first layer's call to the one whose result the second layer
            takes.
    """

    first: fx.Node
    inside: tuple[fx.Node, ...]
    second: fx.Node

    @property
    def name(self) -> str:
        return f"{self.first.target} + {self.second.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPiece:
    """This worker's piece of a divided parameter.

    Args:
        held: the piece.
        dim: the dimension that is divided.
        start: where the piece begins in it.
    """

    held: nn.Parameter
    dim: int
    start: int

    def of(self, whole: Tensor) -> Tensor:
        """Return the same piece of a tensor of the parameter's shape."""
        return whole.narrow(self.dim, self.start, self.held.shape[self.dim])


def pair_of(traced: TracedModel, pieces: Sequence[int]) -> LayerPair:
    """Return the operations of a pair, given the numbers of its pieces."""
    second = traced.pieces[pieces[-1]][0]
    inside = tuple(node for number in pieces[:-1] for node in traced.pieces[number])
    return LayerPair(first=inside[0], inside=inside, second=second)


def single_pairs(
    traced: TracedModel, graph: WorkGraph, num_workers: int
) -> tuple[ChannelPair, ...]:
    """Return the pairs of a model whose layers are used once, with channels for so many workers.

    Args:
        graph: the model's costs.
    """
    return tuple(
        pair for pair in find_pairs(traced, graph)
        if _are_used_once(traced, pair_of(traced, pair.nodes), num_workers)
    )  # fmt: skip


def divisible_pairs(
    traced: TracedModel, graph: WorkGraph, args: Sequence[Tensor], num_workers: int
) -> tuple[ChannelPair, ...]:
    """Return those of `single_pairs` whose columns add up to the pair's output, and between whose
    layers no other operation draws random numbers, which would be other ones in each worker.

    Args:
        args: an example of the model's inputs.
    """
    pairs = single_pairs(traced, graph, num_workers)
    calls = [pair_of(traced, pair.nodes) for pair in pairs]
    values, drawing = _recorded(traced, calls, args), _drawing(traced, args) if pairs else set()
    return tuple(
        pair
        for pair, each in zip(pairs, calls, strict=True)
        if drawing.isdisjoint(_foreign(traced, each))
        and _adds_up(traced, each, values, num_workers)
    )


def _foreign(traced: TracedModel, pair: LayerPair) -> list[fx.Node]:
    """Return the operations that run between a pair's layers and are not of the pair."""
    nodes = list(traced.graph_module.graph.nodes)
    between = nodes[nodes.index(pair.first) : nodes.index(pair.second)]
    return [node for node in between if node not in pair.inside]


def _drawing(traced: TracedModel, args: Sequence[Tensor]) -> set[fx.Node]:
    """Return the operations that draw from torch's generator in training."""
    watch = _DrawWatch(traced.graph_module)
    with (
        modes_kept(traced.module),
        untouched(traced.module),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        traced.module.train()
        watch.run(*args)
    return watch.found


def _are_used_once(traced: TracedModel, pair: LayerPair, num_workers: int) -> bool:
    """Whether each layer of a pair is used once, and has channels for so many workers."""
    layers = _layers(traced, pair)
    if not all(
        _is_alone(traced, node, layer) for node, layer in zip(_calls(pair), layers, strict=True)
    ):
        return False
    channels, inputs = layers[0].weight.shape[0], layers[1].weight.shape[1]
    return bool(channels >= num_workers and inputs % channels == 0)


def _recorded(
    traced: TracedModel, pairs: Sequence[LayerPair], args: Sequence[Tensor]
) -> dict[Any, Tensor]:
    """Return the inputs and outputs of pairs in one pass through the model, by their operations."""
    nodes = [node for pair in pairs for node in (pair.first.args[0], pair.second)]
    recorder = _Recorder(traced.graph_module, nodes)
    if nodes:
        with modes_kept(traced.module), untouched(traced.module), torch.no_grad():
            traced.module.eval()
            recorder.run(*args)
    return recorder.values


def _adds_up(
    traced: TracedModel, pair: LayerPair, values: dict[Any, Tensor], num_workers: int
) -> bool:
    """Whether the outputs of all workers' columns add up to the pair's own."""
    layers, between = _layers(traced, pair), _between(traced, pair)
    if between is None:
        return False
    x, y = values[pair.first.args[0]], values[pair.second]
    with modes_kept(traced.module), untouched(traced.module), torch.no_grad():
        traced.module.eval()
        outputs = [_computed(layers, between, x, rank, num_workers) for rank in range(num_workers)]
    total = _with_bias(torch.stack(outputs).sum(0), layers[1].bias, layers[1])
    return total.shape == y.shape and torch.allclose(total, y, rtol=_CLOSE, atol=_CLOSE)


def _calls(pair: LayerPair) -> tuple[fx.Node, fx.Node]:
    return pair.first, pair.second


def _layers(traced: TracedModel, pair: LayerPair) -> list[Any]:
    return [traced.graph_module.get_submodule(str(node.target)) for node in _calls(pair)]


def _is_alone(traced: TracedModel, node: fx.Node, layer: nn.Module) -> bool:
    """Whether a node is the only one to use a layer, whose parameters are not tied or hooked."""
    graph, root = traced.graph_module.graph, traced.graph_module
    held = {id(parameter) for parameter in layer.parameters()}
    users = [
        user for user in graph.nodes
        if (user.op == "call_module" and _holds(root.get_submodule(str(user.target)), layer))
        or (user.op == "get_attr" and id(_attribute(root, str(user.target))) in held)
    ]  # fmt: skip
    parameters = [p for _, p in traced.module.named_parameters(remove_duplicate=False)]
    return (
        type(layer) in _LAYERS
        and users == [node]
        and len(node.args) == 1
        and sum(id(parameter) in held for parameter in parameters) == len(held)
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        and not layer._backward_hooks
        and not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in layer.parameters())
    )


def _holds(module: nn.Module, layer: nn.Module) -> bool:
    return any(one is layer for one in module.modules())


def _attribute(root: nn.Module, target: str) -> Any:
    value: Any = root
    for name in target.split("."):
        value = getattr(value, name)
    return value


def _between(traced: TracedModel, pair: LayerPair) -> fx.GraphModule | None:
    """Make a module of what lies between the layers; None: it reads other values, too."""
    graph = fx.Graph()
    copies = {pair.first: graph.placeholder("channels")}
    for node in pair.inside[1:]:
        if any(source not in copies for source in node.all_input_nodes):
            return None
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = pair.second.args[0]
    if not isinstance(output, fx.Node) or output not in copies:
        return None
    graph.output(copies[output])
    return fx.GraphModule(traced.graph_module, graph)


class _DrawWatch(fx.Interpreter):
    """Runs a graph, and finds the operations that draw random numbers."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found = set[fx.Node]()

    def run_node(self, n: fx.Node) -> Any:
        before = torch.get_rng_state()
        result = super().run_node(n)
        if not torch.equal(before, torch.get_rng_state()):
            self.found.add(n)
        return result


class _Recorder(fx.Interpreter):
    """Runs a graph, and copies the results of some nodes before other nodes change them."""

    def __init__(self, module: fx.GraphModule, nodes: Sequence[Any]) -> None:
        super().__init__(module)
        self._recorded, self.values = set(nodes), dict[Any, Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self._recorded:
            self.values[n] = result.clone()
        return result


def _share(channels: int, rank: int, size: int, vector: int = 1) -> tuple[int, int]:
    """Return where a worker's channels begin and end.

    Args:
        vector: channels that are computed at once. Whole vectors are divided where no share grows
            much, or shares are so small that the rest of a vector takes as long as a whole one.

    Example:
        >>> [_share(5, rank, 2) for rank in (0, 1)]
        [(0, 2), (2, 5)]
        >>> [_share(64, rank, 3, 16) for rank in (0, 1, 2)]
        [(0, 16), (16, 32), (32, 64)]
    """
    num, rest = divmod(channels, vector)
    largest = -(-num // size) * vector
    is_whole = not rest and num >= size
    if is_whole and (largest < _GROWN * channels / size or channels < 2 * vector * size):
        return num * rank // size * vector, num * (rank + 1) // size * vector
    return channels * rank // size, channels * (rank + 1) // size


def _cuts(layers: Sequence[Any], rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where a worker's outputs of the first layer and inputs of the second begin and end."""
    channels = layers[0].weight.shape[0]
    vector = 1 if isinstance(layers[0], nn.Linear) else _VECTOR
    start, stop = _share(channels, rank, size, vector)
    each = layers[1].weight.shape[1] // channels
    return (start, stop), (start * each, stop * each)


def _computed(layers: Sequence[Any], between: nn.Module, x: Tensor, rank: int, size: int) -> Tensor:
    """Compute one worker's output of a pair, without the second layer's bias."""
    first, second = layers
    (a, b), (c, d) = _cuts(layers, rank, size)
    bias = None if first.bias is None else first.bias[a:b]
    hidden = between(_call_of(first)(x.clone(), first.weight[a:b], bias))
    output: Tensor = _call_of(second)(hidden, second.weight[:, c:d], None)
    return output


def _call_of(layer: Any) -> Callable[..., Tensor]:
    """Return the layer's function (inputs, weight, bias) -> outputs."""
    function: Callable[..., Tensor] = (
        nn.functional.linear if isinstance(layer, nn.Linear) else layer._conv_forward
    )
    return function


def _with_bias(outputs: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor:
    if bias is None:
        return outputs
    if isinstance(layer, nn.Linear):
        return outputs + bias
    spatial = layer.weight.ndim - 2  # type: ignore[operator]  # a layer has a weight
    return outputs + bias.view(-1, *[1] * spatial)


# -- divided ---------------------------------------------------------------------------------------


class PassRandom:
    """Random numbers of one pass: the same in all workers, except within divided channels.

    Args:
        rank: this worker's number in its copy.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._seed, self._count = rank, -1, 0
        self._depth, self._common = 0, torch.empty(0)
        """Divided channels that are computed now, of pairs inside each other; and the state before
        the first of these."""

    @contextmanager
    def begun(self, seed: int) -> Iterator[None]:
        """A block with a pass that all workers begin with this seed; below 0: nothing is drawn."""
        if seed < 0:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self._seed, self._count, self._depth = seed, 0, 0
            yield
            self._seed = -1

    def part(self) -> None:
        """Draw this worker's own random numbers from now on."""
        if self._seed >= 0:
            if not self._depth:
                self._common = torch.get_rng_state()
            self._depth += 1
            self._count += 1
            own_seed = self._seed + _STRIDE * (self._rank + 1) + self._count
            torch.default_generator.manual_seed(own_seed % (1 << 63))

    def rejoin(self) -> None:
        """Draw the random numbers of all workers again."""
        if self._seed >= 0:
            self._depth -= 1
            if not self._depth:
                torch.set_rng_state(self._common)


class ColumnLayer(nn.Module):
    """The first layer of a pair, with this worker's outputs."""

    def __init__(
        self, layer: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None,
        group: MemberGroup, random: PassRandom,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.bias = weight, bias
        self._call, self._group, self._random = _call_of(layer), group, random

    def forward(self, x: Tensor) -> Tensor:
        """Return this worker's channels, from all channels of ``x``."""
        output = self._call(_Enter.apply(x, self._group), self.weight, self.bias)  # type: ignore[no-untyped-call]  # torch's has no types
        self._random.part()
        return output


class RowLayer(nn.Module):
    """The second layer of a pair, with this worker's inputs, summed over all workers."""

    def __init__(
        self, layer: nn.Module, weight: nn.Parameter, group: MemberGroup, random: PassRandom
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = layer.bias
        self._is_linear = isinstance(layer, nn.Linear)
        self._call, self._group, self._random = _call_of(layer), group, random

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole output, from this worker's channels of ``x``."""
        self._random.rejoin()
        output: Tensor = _Sum.apply(self._call(x, self.weight, None), self._group)  # type: ignore[no-untyped-call]  # torch's has no types
        if self.bias is None:
            return output
        spatial = 0 if self._is_linear else self.weight.ndim - 2
        return output + self.bias.view(-1, *[1] * spatial)  # type: ignore[operator]  # a bias is a tensor


class _Enter(torch.autograd.Function):
    """Megatron's f: the identity, whose gradient is summed over all workers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MemberGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return summed(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """Megatron's g: the sum over all workers, whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MemberGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def summed(x: Tensor, group: MemberGroup) -> Tensor:
    """Return the sum of ``x`` over all workers, as a new tensor."""
    total = x.contiguous().clone()
    group.all_reduce(total).wait()
    return total


def divide(
    traced: TracedModel,
    computed: fx.GraphModule,
    pairs: Sequence[LayerPair],
    group: MemberGroup,
    random: PassRandom,
) -> dict[str, ColumnPiece]:
    """Replace the layers of pairs by this worker's columns.

    Args:
        computed: the whole model's operations, whose submodules are replaced.

    Returns:
        This worker's piece of each divided parameter, by the model's name.
    """
    names, pieces = traced.parameter_names(), dict[str, ColumnPiece]()

    def piece(parameter: nn.Parameter, dim: int, cut: tuple[int, int]) -> nn.Parameter:
        part = parameter.detach().narrow(dim, cut[0], cut[1] - cut[0]).clone()
        held = nn.Parameter(part.contiguous(), requires_grad=parameter.requires_grad)
        pieces[names[id(parameter)]] = ColumnPiece(held=held, dim=dim, start=cut[0])
        return held

    for pair in pairs:
        layers = _layers(traced, pair)
        outs, ins = _cuts(layers, group.rank, group.size)
        weight = piece(layers[0].weight, 0, outs)
        bias = None if layers[0].bias is None else piece(layers[0].bias, 0, outs)
        computed.set_submodule(
            str(pair.first.target), ColumnLayer(layers[0], weight, bias, group, random)
        )
        weight = piece(layers[1].weight, 1, ins)
        computed.set_submodule(str(pair.second.target), RowLayer(layers[1], weight, group, random))
    return pieces


class _Absent(MemberGroup):
    """Stands for workers that are not there: every result is this worker's own."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Made:
        return Made()

    def all_gather(self, mine: Tensor, out: Tensor) -> Made:
        return Made()

    def all_to_all(self, mine: Tensor, out: Tensor) -> Made:
        return Made()


def columns_of(
    traced: TracedModel, pairs: Sequence[ChannelPair], rank: int, size: int
) -> nn.Module:
    """Return what a worker computes, to be timed: its columns, whose sums are of these alone.

    The columns have parameters of their own; those of all other layers are the model's.
    """
    computed = make_parts(traced, [0] * len(traced.pieces))[0].module
    assert isinstance(computed, fx.GraphModule)
    divided = [pair_of(traced, pair.nodes) for pair in pairs]
    divide(traced, computed, divided, _Absent(rank, size), PassRandom(rank))
    return computed


def shares_of(traced: TracedModel, pairs: Sequence[ChannelPair], size: int) -> list[float]:
    """Return each worker's share of the channels of each pair, added up; the last has the most."""
    cuts = [
        [_cuts(_layers(traced, pair_of(traced, pair.nodes)), rank, size)[0] for rank in range(size)]
        for pair in pairs
    ]
    return [
        sum((of_pair[rank][1] - of_pair[rank][0]) / of_pair[-1][1] for of_pair in cuts)
        for rank in range(size)
    ]
