"""Chains of layers in the order in which they compute, read from Sequential and forward().

    nn.Sequential(a, b, c)                  a chain: a, b, c
    x = self.fc1(x); x = F.relu(x)          a chain: fc1, relu
    anything else done with x               ends a chain

A chain holds only layers that certainly follow one another. This module must not know rules.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import libcst as cst

from ..porting.tree import positional
from .facts import Facts
from .values import number, pair

_INPUT_ARGUMENT = {"Linear": "in_features", "Embedding": "num_embeddings"}
_OUTPUT_ARGUMENT = {"Linear": "out_features", "Embedding": "embedding_dim"}
ACTIVATIONS = {
    "ReLU", "LeakyReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "ELU", "SELU", "Mish", "PReLU", "ReLU6",
    "Hardswish", "Softplus", "Softmax", "LogSoftmax", "Softmax2d", "CELU", "RReLU", "GLU",
    "Hardtanh", "LogSigmoid", "Softsign", "Tanhshrink", "Threshold", "Hardsigmoid",
}  # fmt: skip
FUNCTIONS = {
    "relu", "relu_", "leaky_relu", "gelu", "silu", "tanh", "sigmoid", "elu", "selu", "mish",
    "softplus", "hardswish", "softmax", "log_softmax", "relu6", "logsigmoid", "prelu", "hardtanh",
}  # fmt: skip
"""Activations in the form of functions."""
DROPOUTS = {
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "dropout", "dropout2d",
}  # fmt: skip
KEEPS_FEATURES = (ACTIVATIONS - {"GLU"}) | FUNCTIONS | DROPOUTS | {"Identity", "LayerNorm"}
"""Layers that keep the number of features."""
POOLS = {
    "max_pool2d", "avg_pool2d", "MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d",
    "AvgPool3d",
}  # fmt: skip
_SIZE_ATTRIBUTES = {"size", "shape", "dim", "ndim", "device", "dtype", "numel"}
"""Attributes and methods that tell a tensor's form, and do not read its numbers."""


class Layer(NamedTuple):
    """One layer of a chain: a module or a function.

    Attributes:
        node: the call that makes the module, or that calls the function.
        kind: the class's or function's name without its package: ``Linear``, ``relu``.
        ins, outs: features or channels; None where unknown, or where they have no meaning.
        call: the call that makes the module; None for a function.
        is_shared: whether its output is read by more than the next layer of the chain.
    """

    node: cst.CSTNode
    kind: str
    ins: int | None = None
    outs: int | None = None
    call: cst.Call | None = None
    is_shared: bool = False

    @property
    def is_conv(self) -> bool:
        return self.kind in ("Conv1d", "Conv2d", "Conv3d")

    @property
    def is_norm(self) -> bool:
        return self.kind.startswith(("BatchNorm", "InstanceNorm", "SyncBatchNorm"))


class Chain(NamedTuple):
    """Layers of which each computes on the output of the one before.

    Attributes:
        node: the Sequential, or the class whose forward() has the layers.
        layers: the layers, in the order in which they compute.
        is_whole: whether they are all of the network, from its input to its output.
    """

    node: cst.CSTNode
    layers: tuple[Layer, ...]
    is_whole: bool


def layer_of(facts: Facts, call: cst.Call) -> Layer:
    """Return the layer that a call makes."""
    kind = facts.script.meaning(call.func).rpartition(".")[2]
    ins = outs = None
    if kind in _INPUT_ARGUMENT:
        ins = number(facts.flow, facts.argument(call, _INPUT_ARGUMENT[kind], 0))
        outs = number(facts.flow, facts.argument(call, _OUTPUT_ARGUMENT[kind], 1))
    elif kind.startswith(("Conv", "LazyConv")) and not kind.startswith("Lazy"):
        ins = number(facts.flow, facts.argument(call, "in_channels", 0))
        outs = number(facts.flow, facts.argument(call, "out_channels", 1))
    elif kind.startswith(("BatchNorm", "InstanceNorm")):
        ins = outs = number(facts.flow, facts.argument(call, "num_features", 0))
    return Layer(call, kind, ins, outs, call)


def chains(facts: Facts) -> list[Chain]:
    """Return all chains of a script."""
    return facts.once(chains, lambda: _find_chains(facts))


def _find_chains(facts: Facts) -> list[Chain]:
    inner = {
        node for call in facts.script.calls("Sequential") for node in facts.script.within(call)
        if isinstance(node, cst.Call) and node is not call
    }  # fmt: skip
    all_chains = [
        Chain(call, tuple(layers), True)
        for call in facts.script.calls("Sequential")
        if call not in inner and (layers := sequential(facts, call))
    ]
    for node in facts.modules.values():
        all_chains += _chains_of_class(facts, node)
    return all_chains


def sequential(
    facts: Facts, call: cst.Call, outer: frozenset[cst.Call] = frozenset()
) -> list[Layer]:
    """Return the layers of a Sequential, inner ones unfolded; empty where they cannot be listed.

    Args:
        outer: the Sequentials around it, since ``net.fc = nn.Sequential(net.fc, ...)`` may name
            itself.
    """
    if call in outer:
        return []
    if facts.has_stars(call) or not re.search(r"(^|\.)nn\.Sequential$", facts.meaning(call)):
        return []
    layers: list[Layer] = []
    for argument in positional(call):
        item = _single_origin(facts, argument)
        if not isinstance(item, cst.Call):
            return []
        name = facts.script.meaning(item.func)
        if name.endswith("Sequential"):
            layers += sequential(facts, item, outer | {call}) or [Layer(item, "unknown")]
        elif facts.is_module_call(item) and name not in facts.modules:
            layers.append(layer_of(facts, item))
        else:
            layers.append(Layer(item, "unknown"))
    return layers


def _single_origin(facts: Facts, expr: cst.BaseExpression) -> cst.BaseExpression:
    """Return the only expression that can make a value, or else the value's own expression."""
    if isinstance(expr, cst.Call):
        return expr
    origins = facts.flow.origins(expr)
    return origins[0] if len(origins) == 1 else expr


def _chains_of_class(facts: Facts, node: cst.ClassDef) -> Iterator[Chain]:
    """Yield the chains of a class: what its forward() does to one value, line by line."""
    if not isinstance(node.body, cst.IndentedBlock):
        return
    forward = next(
        (line for line in node.body.body
         if isinstance(line, cst.FunctionDef) and line.name.value == "forward"), None,
    )  # fmt: skip
    if forward is None or not isinstance(forward.body, cst.IndentedBlock):
        return
    chain: list[Layer] = []
    name, is_whole = "", True
    for line in forward.body.body:
        statement = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
        value = getattr(statement, "value", None)
        if isinstance(statement, cst.Return) and isinstance(value, cst.Tuple):
            value = value.elements[0].value  # the output; a state or the like follows it
        applied = None if value is None else _applied(facts, node, value)
        target = (
            facts.code(statement.targets[0].target) if isinstance(statement, cst.Assign) else ""
        )
        is_next = applied is not None and (not chain or applied[0] == name)
        if applied is None or not is_next:
            if isinstance(statement, cst.Expr) and isinstance(value, cst.SimpleString):
                continue
            if chain:
                yield Chain(node, tuple(chain), False)
            chain, is_whole = [], False
            if applied is None:
                continue
        chain += applied[1] if applied is not None else []
        if chain and _num_readers(facts, forward.body.body, line, target) > 1:
            chain[-1] = chain[-1]._replace(is_shared=True)
        name = target
        if isinstance(statement, cst.Return):
            break
    if chain:
        yield Chain(node, tuple(chain), is_whole)


def _num_readers(facts: Facts, lines: Sequence[cst.CSTNode], line: cst.CSTNode, name: str) -> int:
    """Count the reads of a name after the line that assigns it, until it is assigned again.

    Reads of its form alone, such as ``x.shape``, do not count.
    """
    count = 0
    for later in lines[lines.index(line) + 1 :] if name else ():
        statement = later.body[0] if isinstance(later, cst.SimpleStatementLine) else None
        node = later
        if isinstance(statement, cst.Assign) and facts.code(statement.targets[0].target) == name:
            node = statement.value
        for part in facts.script.within(node):
            if isinstance(part, cst.Name) and part.value == name:
                parent = facts.script.parents[part]
                count += not (
                    isinstance(parent, cst.Attribute) and parent.attr.value in _SIZE_ATTRIBUTES
                )
        if node is not later:
            break
    return count


def _applied(
    facts: Facts, owner: cst.ClassDef, expr: cst.BaseExpression
) -> tuple[str, list[Layer]] | None:
    """Return the name of the value that an expression computes on, and the layers applied to it.

    ``F.relu(self.fc1(x))`` gives ``x`` and fc1, relu; any other expression gives None.
    """
    if isinstance(expr, cst.Name):
        return expr.value, []
    if not isinstance(expr, cst.Call):
        return None
    method = facts.method(expr)
    name = facts.script.meaning(expr.func)
    if name.startswith("self."):
        layers = layers_at(facts, owner, name)
    elif re.search(r"^torch\.|functional\.|(^|\.)F\.", name):
        layers = [Layer(expr, name.rpartition(".")[2])]
    elif method:  # x.view(...), x.relu()
        inner = _applied(facts, owner, facts.owner(expr))
        return None if inner is None else (inner[0], [*inner[1], Layer(expr, method)])
    else:
        return None
    arguments = positional(expr)
    if not arguments or (name.startswith("self.") and len(arguments) > 1):
        return None
    inner = _applied(facts, owner, arguments[0])
    return None if inner is None else (inner[0], [*inner[1], *layers])


def layers_at(facts: Facts, owner: cst.ClassDef, name: str) -> list[Layer]:
    """Return the layers of a name such as ``self.fc1``, by the class's only assignment to it."""
    bindings = [
        binding for binding in facts.script.bindings
        if binding.name == name and facts.flow.owner(facts.script.scope(binding.node)) is owner
    ]  # fmt: skip
    value = bindings[0].value if len(bindings) == 1 and bindings[0].place is None else None
    if isinstance(value, cst.Call) and facts.is_module_call(value):
        if facts.script.meaning(value.func).endswith("Sequential"):
            return sequential(facts, value) or [Layer(value, "unknown")]
        if facts.script.meaning(value.func) not in facts.modules:
            return [layer_of(facts, value)]
    return [Layer(owner, "unknown")]


def output_size(
    facts: Facts, layers: tuple[Layer, ...], size: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the output size of convolutions and pools, or None where the text does not say it.

    Args:
        size: (channels, height, width) of the input; the result has the same form.
    """
    channels, height, width = size
    for layer in layers:
        if layer.kind in ACTIVATIONS or layer.is_norm or layer.kind.startswith("Dropout"):
            continue
        if layer.call is None or layer.kind not in ("Conv2d", "MaxPool2d", "AvgPool2d"):
            return None
        is_conv = layer.kind == "Conv2d"
        first = 2 if is_conv else 0
        kernel_size = facts.argument(layer.call, "kernel_size", first)
        kernel = None if kernel_size is None else pair(facts.flow, kernel_size, 1)
        if kernel is None:
            return None
        step = facts.argument(layer.call, "stride", first + 1)
        stride = pair(facts.flow, step, 1) if is_conv or step else kernel
        padding = pair(facts.flow, facts.argument(layer.call, "padding", first + 2), 0)
        dilation = pair(facts.flow, facts.argument(layer.call, "dilation", first + 3), 1)
        if stride is None or padding is None or dilation is None:
            return None
        if is_conv and layer.outs is None:
            return None
        height, width = (
            (length + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
            for i, length in enumerate((height, width))
        )
        channels = layer.outs or channels if is_conv else channels
    return channels, height, width
