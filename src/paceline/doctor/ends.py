"""The last operation that made a value: ``softmax`` in ``x.softmax(1)``, a network's last layer.

    out = model(x)   ->   the last layer of its Sequential, or what its forward() returns

Assignments in a branch are not followed. This module must not know rules.
"""

import re

import libcst as cst

from ..porting.tree import by_name
from .facts import Facts
from .layers import Layer, layer_of, layers_at, sequential

_KEEP_VALUE = {"float", "double", "half", "to", "cuda", "squeeze", "unsqueeze", "view", "reshape"}
"""Methods that keep the meaning of a value, such as that it is a probability."""


def ending(facts: Facts, expr: cst.BaseExpression, depth: int = 0) -> Layer | None:
    """Return the last operation that made a value: a function, or a network's last layer."""
    if depth > 4:
        return None
    if isinstance(expr, cst.Call):
        name = facts.meaning(expr)
        if isinstance(expr.func, cst.Name | cst.Attribute) and facts.is_model(expr.func):
            return _last_layer(facts, expr.func)
        if facts.method(expr) in _KEEP_VALUE and not name.startswith("torch."):
            return ending(facts, facts.owner(expr), depth + 1)
        if re.search(r"^torch\.|functional\.|^\.", name) or facts.method(expr):
            return Layer(expr, name.rpartition(".")[2])
        return None
    if isinstance(expr, cst.Name):
        script = facts.script
        home, order = facts.flow.home(expr.value, script.scope(expr)), script.order
        ancestors = set(script.up(expr))
        bindings = [
            binding
            for binding in facts.flow.bindings(expr.value, home)
            if order[binding.node] < order[expr]
        ]
        last = max(bindings, key=lambda binding: order[binding.node], default=None)
        if last is not None and any(
            isinstance(node, cst.If) and node not in ancestors for node in script.up(last.node)
        ):
            return None
        if last is not None and last.place is None:
            return ending(facts, last.value, depth + 1)
    return None


def _last_layer(facts: Facts, model: cst.BaseExpression) -> Layer | None:
    """Return the layer that every path through a network ends in, or None where it is unknown."""
    constructors = facts.constructors(model)
    if len(constructors) != 1:
        return None
    constructor = constructors[0]
    class_name = facts.script.meaning(constructor.func)
    if class_name.endswith("nn.Sequential"):
        layers = sequential(facts, constructor)
        return layers[-1] if layers else None
    node = facts.modules.get(class_name)
    if node is None or not isinstance(node.body, cst.IndentedBlock):
        return layer_of(facts, constructor) if facts.is_module_call(constructor) else None
    forward = next(
        (line for line in node.body.body
         if isinstance(line, cst.FunctionDef) and line.name.value == "forward"), None,
    )  # fmt: skip
    returned = [
        inner.value for inner in facts.script.within(forward)
        if isinstance(inner, cst.Return) and inner.value is not None
    ] if forward is not None else []  # fmt: skip
    if len(returned) != 1:
        return None
    value = returned[0]
    if isinstance(value, cst.Name):
        last = ending(facts, value)
        bindings = facts.flow.bindings(value.value, forward) if forward else []
        value = bindings[-1].value if bindings else value
        if last is not None and not facts.code(value).startswith("self."):
            return last
    if isinstance(value, cst.Call) and facts.script.meaning(value.func).startswith("self."):
        layers = layers_at(facts, node, facts.script.meaning(value.func))
        return layers[-1] if layers else None
    return ending(facts, value) if isinstance(value, cst.Call) else None


_MODE_LAYERS = re.compile(r"(^|\.)nn\.(Alpha|Feature)?(Dropout\w*|BatchNorm\w*)$")
_RECURRENT = re.compile(r"(^|\.)nn\.(LSTM|GRU|RNN)$")


def has_mode_layers(facts: Facts) -> bool:
    """Whether the script makes layers that differ in training mode: dropout, batch norm."""
    return any(
        _MODE_LAYERS.search(facts.meaning(call))
        or (_RECURRENT.search(facts.meaning(call)) and _has_dropout(facts, call))
        for call in facts.script.every_call
    )


def _has_dropout(facts: Facts, recurrent: cst.Call) -> bool:
    """Whether a recurrent network is given dropout between its layers."""
    dropout = by_name(recurrent).get("dropout")
    return dropout is not None and facts.code(dropout) not in ("0", "0.0")
