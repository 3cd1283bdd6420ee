"""Pairs of layers whose channels are divided over the workers of a copy: which, and how they run.

             .-- worker 0   first: some outputs -- between -- second: some inputs --.
    x, all --|                                                                      |-- sum, + bias
             '-- worker 1   first: the others   -- between -- second: the others ---'

    forward    x is there                      the sum is an all-reduce
    backward   its gradient is an all-reduce   the sum's gradient is there

The pairs are found by splits/channels.py and proved here, each on an example: the sum of what all
workers would give is what the two layers give. AlexNet's two columns are such pairs (A. Krizhevsky
et al., "ImageNet Classification with Deep Convolutional Neural Networks", 2012; M. Shoeybi et al.,
"Megatron-LM", 2019, section 3, for f and g, here `_Enter` and `_Sum`). Above 300 lines, since
what is proved is what is run. This module must not know batches nor optimizers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..exchange.group import MemberGroup
from ..splits.tracing import TracedModel, untouched
from .modes import modes_kept

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CLOSE = 1e-4
_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of workers: 2 ** 64 over the golden ratio, as splitmix64 has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPair:
    """Two layers and what lies between, as operations.

    Args:
        inside: operations from the first layer's to what the second one takes.
    """

    first: fx.Node
    inside: tuple[fx.Node, ...]
    second: fx.Node

    @property
    def name(self) -> str:
        return f"{self.first.target} + {self.second.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPiece:
    """What this worker has of a divided parameter; ``start``: in the dimension that is divided."""

    held: nn.Parameter
    dim: int
    start: int

    def of(self, whole: Tensor) -> Tensor:
        """This worker's part of a tensor of the parameter's shape."""
        return whole.narrow(self.dim, self.start, self.held.shape[self.dim])


def pair_of(traced: TracedModel, pieces: Sequence[int]) -> LayerPair:
    """The operations of a pair, by the numbers of its pieces."""
    second = traced.pieces[pieces[-1]][0]
    inside = tuple(node for number in pieces[:-1] for node in traced.pieces[number])
    return LayerPair(first=inside[0], inside=inside, second=second)


def can_divide(
    traced: TracedModel, pair: LayerPair, given: Sequence[Tensor], num_workers: int
) -> bool:
    """Whether each layer is called once, by itself, and what its columns give adds up to it."""
    layers = [_layer(traced, node) for node in (pair.first, pair.second)]
    if not all(
        _is_alone(traced, node, one) for node, one in zip(_calls(pair), layers, strict=True)
    ):
        return False
    channels, inputs = layers[0].weight.shape[0], layers[1].weight.shape[1]
    if channels < num_workers or inputs % channels:
        return False
    between = _between(traced, pair)
    if between is None:
        return False
    with modes_kept(traced.module), untouched(traced.module), torch.no_grad():
        traced.module.eval()
        seen = _Seen(traced.graph_module, (pair.first.args[0], pair.second))
        seen.run(*given)
        x, y = (seen.values[node] for node in (pair.first.args[0], pair.second))
        made = [_computed(layers, between, x, rank, num_workers) for rank in range(num_workers)]
    total = _with_bias(torch.stack(made).sum(0), layers[1].bias, layers[1])
    return total.shape == y.shape and torch.allclose(total, y, rtol=_CLOSE, atol=_CLOSE)


def _calls(pair: LayerPair) -> tuple[fx.Node, fx.Node]:
    return pair.first, pair.second


def _layer(traced: TracedModel, node: fx.Node) -> Any:
    return traced.graph_module.get_submodule(str(node.target))


def _is_alone(traced: TracedModel, node: fx.Node, layer: nn.Module) -> bool:
    """Whether nothing else computes with it, and nothing of the script's looks at it."""
    graph, root = traced.graph_module.graph, traced.graph_module
    own = {id(one) for one in layer.parameters()}
    read = [
        one for one in graph.nodes
        if (one.op == "call_module" and root.get_submodule(str(one.target)) is layer)
        or (one.op == "get_attr" and id(_attribute(root, str(one.target))) in own)
    ]  # fmt: skip
    names = [one for _, one in traced.module.named_parameters(remove_duplicate=False)]
    return (
        type(layer) in _LAYERS
        and read == [node]
        and len(node.args) == 1
        and sum(id(one) in own for one in names) == len(own)
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        and not layer._backward_hooks
        and not any(
            one._backward_hooks or one._post_accumulate_grad_hooks for one in layer.parameters()
        )
    )


def _attribute(root: nn.Module, target: str) -> Any:
    value: Any = root
    for name in target.split("."):
        value = getattr(value, name)
    return value


def _between(traced: TracedModel, pair: LayerPair) -> fx.GraphModule | None:
    """What lies between the layers; None: it needs something else, too."""
    graph = fx.Graph()
    copies = {pair.first: graph.placeholder("channels")}
    for node in pair.inside[1:]:
        if any(one not in copies for one in node.all_input_nodes):
            return None
        copies[node] = graph.node_copy(node, copies.__getitem__)
    wanted = pair.second.args[0]
    if not isinstance(wanted, fx.Node) or wanted not in copies:
        return None
    graph.output(copies[wanted])
    return fx.GraphModule(traced.graph_module, graph)


class _Seen(fx.Interpreter):
    """What some operations give, before others change it."""

    def __init__(self, module: fx.GraphModule, wanted: Sequence[Any]) -> None:
        super().__init__(module)
        self._wanted, self.values = set(wanted), dict[Any, Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n in self._wanted:
            self.values[n] = made.clone()
        return made


def _share(channels: int, rank: int, size: int) -> tuple[int, int]:
    """Where a worker's channels begin and end.

    Example:
        >>> [_share(5, rank, 2) for rank in (0, 1)]
        [(0, 2), (2, 5)]
    """
    return channels * rank // size, channels * (rank + 1) // size


def _cuts(layers: Sequence[Any], rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the first one's outputs, and of the second one's inputs: begin and end."""
    channels = layers[0].weight.shape[0]
    start, stop = _share(channels, rank, size)
    each = layers[1].weight.shape[1] // channels
    return (start, stop), (start * each, stop * each)


def _computed(layers: Sequence[Any], between: nn.Module, x: Tensor, rank: int, size: int) -> Tensor:
    """What one worker would give of a pair."""
    first, second = layers
    (a, b), (c, d) = _cuts(layers, rank, size)
    bias = None if first.bias is None else first.bias[a:b]
    hidden = between(_call_of(first)(x.clone(), first.weight[a:b], bias))
    made: Tensor = _call_of(second)(hidden, second.weight[:, c:d], None)
    return made


def _call_of(layer: Any) -> Callable[..., Tensor]:
    """(inputs, weight, bias) -> outputs, as the layer does it."""
    found: Callable[..., Tensor] = (
        nn.functional.linear if isinstance(layer, nn.Linear) else layer._conv_forward
    )
    return found


def _with_bias(made: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor:
    if bias is None:
        return made
    if isinstance(layer, nn.Linear):
        return made + bias
    spatial = layer.weight.ndim - 2  # type: ignore[operator]  # a layer has a weight
    return made + bias.view(-1, *[1] * spatial)


# -- divided ---------------------------------------------------------------------------------------


class PassRandom:
    """Random numbers of one pass: the same in all workers, but for those of divided channels.

    Args:
        rank: of this worker in its copy.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._seed, self._count = rank, -1, 0
        self._common: Tensor | None = None

    @contextmanager
    def begun(self, seed: int) -> Iterator[None]:
        """A pass that all begin with this seed; below 0: it has no random numbers."""
        if seed < 0:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self._seed, self._count = seed, 0
            yield
            self._seed = -1

    def part(self) -> None:
        """What follows is of this worker's channels."""
        if self._seed >= 0:
            self._common = torch.get_rng_state()
            self._count += 1
            own = self._seed + _STRIDE * (self._rank + 1) + self._count
            torch.default_generator.manual_seed(own % (1 << 63))

    def rejoin(self) -> None:
        """What follows is the same in all."""
        if self._seed >= 0 and self._common is not None:
            torch.set_rng_state(self._common)


class ColumnLayer(nn.Module):
    """Some outputs of the first layer of a pair."""

    def __init__(
        self, layer: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None,
        group: MemberGroup, random: PassRandom,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.bias = weight, bias
        self._call, self._group, self._random = _call_of(layer), group, random

    def forward(self, x: Tensor) -> Tensor:
        """Of all channels of ``x``."""
        made = self._call(_Enter.apply(x, self._group), self.weight, self.bias)  # type: ignore[no-untyped-call]  # torch's has no types
        self._random.part()
        return made


class RowLayer(nn.Module):
    """Some inputs of the second layer of a pair, and the sum over all workers."""

    def __init__(
        self, layer: nn.Module, weight: nn.Parameter, group: MemberGroup, random: PassRandom
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = layer.bias
        self._is_linear = isinstance(layer, nn.Linear)
        self._call, self._group, self._random = _call_of(layer), group, random

    def forward(self, x: Tensor) -> Tensor:
        """Of this worker's channels; what is given is whole."""
        self._random.rejoin()
        made: Tensor = _Sum.apply(self._call(x, self.weight, None), self._group)  # type: ignore[no-untyped-call]  # torch's has no types
        if self.bias is None:
            return made
        spatial = 0 if self._is_linear else self.weight.ndim - 2
        return made + self.bias.view(-1, *[1] * spatial)  # type: ignore[operator]  # a bias is a tensor


class _Enter(torch.autograd.Function):
    """Megatron's f: what all have goes on to each one's columns; its gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MemberGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return summed(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """Megatron's g: the sum of what all columns give; its gradient goes to each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MemberGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def summed(x: Tensor, group: MemberGroup) -> Tensor:
    """Over all workers; ``x`` stays."""
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
    """This worker's columns, put in the place of the layers.

    Args:
        computed: the whole model's operations, whose submodules may be replaced.

    Returns:
        Of each divided parameter by the model's name what this worker has.
    """
    names, pieces = traced.parameter_names(), dict[str, ColumnPiece]()

    def piece(parameter: nn.Parameter, dim: int, cut: tuple[int, int]) -> nn.Parameter:
        part = parameter.detach().narrow(dim, cut[0], cut[1] - cut[0]).clone()
        held = nn.Parameter(part.contiguous(), requires_grad=parameter.requires_grad)
        pieces[names[id(parameter)]] = ColumnPiece(held=held, dim=dim, start=cut[0])
        return held

    for pair in pairs:
        layers = [_layer(traced, node) for node in _calls(pair)]
        outs, ins = _cuts(layers, group.rank, group.size)
        weight = piece(layers[0].weight, 0, outs)
        bias = None if layers[0].bias is None else piece(layers[0].bias, 0, outs)
        computed.set_submodule(
            str(pair.first.target), ColumnLayer(layers[0], weight, bias, group, random)
        )
        weight = piece(layers[1].weight, 1, ins)
        computed.set_submodule(str(pair.second.target), RowLayer(layers[1], weight, group, random))
    return pieces
