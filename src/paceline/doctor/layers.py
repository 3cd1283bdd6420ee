"""Layers in the order in which they compute, where the text says it: Sequential, and forward().

    nn.Sequential(a, b, c)                  a chain: a, b, c
    x = self.fc1(x); x = F.relu(x)          a chain: fc1, relu
    anything else done with x               the end of a chain

A chain is only what certainly follows one another. This module must not know rules.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import libcst as cst

from ..porting.tree import positional
from .facts import Facts
from .values import number, pair

_FIRST = {"Linear": "in_features", "Embedding": "num_embeddings"}
_SECOND = {"Linear": "out_features", "Embedding": "embedding_dim"}
ACTIVATIONS = {
    "ReLU", "LeakyReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "ELU", "SELU", "Mish", "PReLU", "ReLU6",
    "Hardswish", "Softplus", "Softmax", "LogSoftmax", "Softmax2d", "CELU", "RReLU", "GLU",
    "Hardtanh", "LogSigmoid", "Softsign", "Tanhshrink", "Threshold", "Hardsigmoid",
}  # fmt: skip
FUNCTIONS = {
    "relu", "relu_", "leaky_relu", "gelu", "silu", "tanh", "sigmoid", "elu", "selu", "mish",
    "softplus", "hardswish", "softmax", "log_softmax", "relu6", "logsigmoid", "prelu", "hardtanh",
}  # fmt: skip
"""Activations as functions."""
DROPOUTS = {
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "AlphaDropout",
    "dropout",
    "dropout2d",
}
KEEPS_FEATURES = (ACTIVATIONS - {"GLU"}) | FUNCTIONS | DROPOUTS | {"Identity", "LayerNorm"}
POOLS = {
    "max_pool2d",
    "avg_pool2d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
}

_SIZES = {"size", "shape", "dim", "ndim", "device", "dtype", "numel"}
"""What is asked of a tensor without its numbers."""


class Layer(NamedTuple):
    """One layer of a chain.

    Attributes:
        node: where it is made, or for a function where it is called.
        kind: the class's or the function's last name: ``Linear``, ``relu``.
        ins, outs: features or channels; None: not said, or of no meaning.
        call: the call that makes a module; None for a function.
        is_shared: whether what it makes is read by more than what follows it in the chain.
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
    """Layers in a row.

    Attributes:
        node: the Sequential, or the class.
        is_whole: whether it is all of the network, from its input to its output.
    """

    node: cst.CSTNode
    layers: tuple[Layer, ...]
    is_whole: bool


def layer_of(facts: Facts, call: cst.Call) -> Layer:
    """A layer from the call that makes it."""
    kind = facts.script.meaning(call.func).rpartition(".")[2]
    ins = outs = None
    if kind in _FIRST:
        ins = number(facts.flow, facts.given(call, _FIRST[kind], 0))
        outs = number(facts.flow, facts.given(call, _SECOND[kind], 1))
    elif kind.startswith(("Conv", "LazyConv")) and not kind.startswith("Lazy"):
        ins = number(facts.flow, facts.given(call, "in_channels", 0))
        outs = number(facts.flow, facts.given(call, "out_channels", 1))
    elif kind.startswith(("BatchNorm", "InstanceNorm")):
        ins = outs = number(facts.flow, facts.given(call, "num_features", 0))
    return Layer(call, kind, ins, outs, call)


def chains(facts: Facts) -> list[Chain]:
    """All chains of a script."""
    return facts.once(chains, lambda: _find_chains(facts))


def _find_chains(facts: Facts) -> list[Chain]:
    inner = {
        one for call in facts.script.calls("Sequential") for one in facts.script.within(call)
        if isinstance(one, cst.Call) and one is not call
    }  # fmt: skip
    found = [
        Chain(call, tuple(layers), True)
        for call in facts.script.calls("Sequential")
        if call not in inner and (layers := sequential(facts, call))
    ]
    for node in facts.modules.values():
        found += _of_class(facts, node)
    return found


def sequential(
    facts: Facts, call: cst.Call, outer: frozenset[cst.Call] = frozenset()
) -> list[Layer]:
    """The layers of a Sequential, inner ones unfolded; empty where they cannot be listed.

    Args:
        outer: those that it stands in: ``net.fc = nn.Sequential(net.fc, ...)`` may name itself.
    """
    if call in outer:
        return []
    if facts.has_stars(call) or not re.search(r"(^|\.)nn\.Sequential$", facts.meaning(call)):
        return []
    found: list[Layer] = []
    for one in positional(call):
        one = _alone(facts, one)
        if not isinstance(one, cst.Call):
            return []
        name = facts.script.meaning(one.func)
        if name.endswith("Sequential"):
            found += sequential(facts, one, outer | {call}) or [Layer(one, "unknown")]
        elif facts.is_module_call(one) and name not in facts.modules:
            found.append(layer_of(facts, one))
        else:
            found.append(Layer(one, "unknown"))
    return found


def _alone(facts: Facts, expr: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(expr, cst.Call):
        return expr
    made = facts.flow.origins(expr)
    return made[0] if len(made) == 1 else expr


def _of_class(facts: Facts, node: cst.ClassDef) -> Iterator[Chain]:
    """What its forward() does to one value, statement by statement."""
    if not isinstance(node.body, cst.IndentedBlock):
        return
    forward = next(
        (one for one in node.body.body
         if isinstance(one, cst.FunctionDef) and one.name.value == "forward"), None,
    )  # fmt: skip
    if forward is None or not isinstance(forward.body, cst.IndentedBlock):
        return
    chain: list[Layer] = []
    name, is_whole = "", True
    for line in forward.body.body:
        row = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
        value = getattr(row, "value", None)
        if isinstance(row, cst.Return) and isinstance(value, cst.Tuple):
            value = value.elements[0].value  # the output, with a state or the like behind it
        done = None if value is None else _applied(facts, node, value)
        target = facts.code(row.targets[0].target) if isinstance(row, cst.Assign) else ""
        is_next = done is not None and (not chain or done[0] == name)
        if done is None or not is_next:
            if isinstance(row, cst.Expr) and isinstance(value, cst.SimpleString):
                continue
            if chain:
                yield Chain(node, tuple(chain), False)
            chain, is_whole = [], False
            if done is None:
                continue
        chain += done[1] if done is not None else []
        if chain and _num_readers(facts, forward.body.body, line, target) > 1:
            chain[-1] = chain[-1]._replace(is_shared=True)
        name = target
        if isinstance(row, cst.Return):
            break
    if chain:
        yield Chain(node, tuple(chain), is_whole)


def _num_readers(facts: Facts, lines: Sequence[cst.CSTNode], line: cst.CSTNode, name: str) -> int:
    """How many times what a line gives to a name is read behind it, its sizes left out."""
    count = 0
    for later in lines[lines.index(line) + 1 :] if name else ():
        row = later.body[0] if isinstance(later, cst.SimpleStatementLine) else None
        read = later
        if isinstance(row, cst.Assign) and facts.code(row.targets[0].target) == name:
            read = row.value
        for one in facts.script.within(read):
            if isinstance(one, cst.Name) and one.value == name:
                above = facts.script.parents[one]
                count += not (isinstance(above, cst.Attribute) and above.attr.value in _SIZES)
        if read is not later:
            break
    return count


def _applied(
    facts: Facts, owner: cst.ClassDef, expr: cst.BaseExpression
) -> tuple[str, list[Layer]] | None:
    """``F.relu(self.fc1(x))``: the name of x, and fc1, relu; None: something else."""
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
        below = _applied(facts, owner, facts.owner(expr))
        return None if below is None else (below[0], [*below[1], Layer(expr, method)])
    else:
        return None
    given = positional(expr)
    if not given or (name.startswith("self.") and len(given) > 1):
        return None
    below = _applied(facts, owner, given[0])
    return None if below is None else (below[0], [*below[1], *layers])


def layers_at(facts: Facts, owner: cst.ClassDef, name: str) -> list[Layer]:
    """The layers of ``self.fc1``, by what the class binds it to."""
    bound = [
        one for one in facts.script.bindings
        if one.name == name and facts.flow.owner(facts.script.scope(one.node)) is owner
    ]  # fmt: skip
    value = bound[0].value if len(bound) == 1 and bound[0].place is None else None
    if isinstance(value, cst.Call) and facts.is_module_call(value):
        if facts.script.meaning(value.func).endswith("Sequential"):
            return sequential(facts, value) or [Layer(value, "unknown")]
        if facts.script.meaning(value.func) not in facts.modules:
            return [layer_of(facts, value)]
    return [Layer(owner, "unknown")]


def output_size(
    facts: Facts, layers: tuple[Layer, ...], size: tuple[int, ...]
) -> tuple[int, ...] | None:
    """What (channels, height, width) become in convolutions and pools; None: not said."""
    channels, height, width = size
    for one in layers:
        if one.kind in ACTIVATIONS or one.is_norm or one.kind.startswith("Dropout"):
            continue
        if one.call is None or one.kind not in ("Conv2d", "MaxPool2d", "AvgPool2d"):
            return None
        is_conv = one.kind == "Conv2d"
        first = 2 if is_conv else 0
        kernel_given = facts.given(one.call, "kernel_size", first)
        kernel = None if kernel_given is None else pair(facts.flow, kernel_given, 1)
        if kernel is None:
            return None
        step_given = facts.given(one.call, "stride", first + 1)
        step = pair(facts.flow, step_given, 1) if is_conv or step_given else kernel
        padding = pair(facts.flow, facts.given(one.call, "padding", first + 2), 0)
        dilation = pair(facts.flow, facts.given(one.call, "dilation", first + 3), 1)
        if step is None or padding is None or dilation is None or (is_conv and one.outs is None):
            return None
        height, width = (
            (length + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // step[i] + 1
            for i, length in enumerate((height, width))
        )
        channels = one.outs or channels if is_conv else channels
    return channels, height, width
