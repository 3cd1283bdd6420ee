"""What a value was made by last: ``softmax`` of ``x.softmax(1)``, the last layer of a network.

    out = model(x)   ->   the last layer of its Sequential, or what its forward() returns

What stands in a branch is not followed. This module must not know rules.
"""

import re

import libcst as cst

from ..porting.tree import by_name
from .facts import Facts
from .layers import Layer, layer_of, layers_at, sequential

_SAME = {"float", "double", "half", "to", "cuda", "squeeze", "unsqueeze", "view", "reshape"}
"""Methods that keep what a value is."""


def ending(facts: Facts, expr: cst.BaseExpression, depth: int = 0) -> Layer | None:
    """The last thing that is done to make a value: a function, or a network's last layer."""
    if depth > 4:
        return None
    if isinstance(expr, cst.Call):
        name = facts.meaning(expr)
        if isinstance(expr.func, cst.Name | cst.Attribute) and facts.is_model(expr.func):
            return _last_layer(facts, expr.func)
        if facts.method(expr) in _SAME and not name.startswith("torch."):
            return ending(facts, facts.owner(expr), depth + 1)
        if re.search(r"^torch\.|functional\.|^\.", name) or facts.method(expr):
            return Layer(expr, name.rpartition(".")[2])
        return None
    if isinstance(expr, cst.Name):
        script = facts.script
        home, order = facts.flow.home(expr.value, script.scope(expr)), script.order
        around = set(script.up(expr))
        bound = [
            one for one in facts.flow.bindings(expr.value, home) if order[one.node] < order[expr]
        ]
        last = max(bound, key=lambda one: order[one.node], default=None)
        if last is not None and any(
            isinstance(one, cst.If) and one not in around for one in script.up(last.node)
        ):
            return None
        if last is not None and last.place is None:
            return ending(facts, last.value, depth + 1)
    return None


def _last_layer(facts: Facts, model: cst.BaseExpression) -> Layer | None:
    """What every way through a network ends in; None: not said."""
    made = facts.made(model)
    if len(made) != 1:
        return None
    kind = facts.script.meaning(made[0].func)
    if kind.endswith("nn.Sequential"):
        layers = sequential(facts, made[0])
        return layers[-1] if layers else None
    node = facts.modules.get(kind)
    if node is None or not isinstance(node.body, cst.IndentedBlock):
        return layer_of(facts, made[0]) if facts.is_module_call(made[0]) else None
    forward = next(
        (one for one in node.body.body
         if isinstance(one, cst.FunctionDef) and one.name.value == "forward"), None,
    )  # fmt: skip
    returned = [
        one.value for one in facts.script.within(forward)
        if isinstance(one, cst.Return) and one.value is not None
    ] if forward is not None else []  # fmt: skip
    if len(returned) != 1:
        return None
    value = returned[0]
    if isinstance(value, cst.Name):
        found = ending(facts, value)
        bound = [one.value for one in facts.flow.bindings(value.value, forward)] if forward else []
        value = bound[-1] if bound else value
        if found is not None and not facts.code(value).startswith("self."):
            return found
    if isinstance(value, cst.Call) and facts.script.meaning(value.func).startswith("self."):
        layers = layers_at(facts, node, facts.script.meaning(value.func))
        return layers[-1] if layers else None
    return ending(facts, value) if isinstance(value, cst.Call) else None


_MODES = re.compile(r"(^|\.)nn\.(Alpha|Feature)?(Dropout\w*|BatchNorm\w*)$")
_RECURRENT = re.compile(r"(^|\.)nn\.(LSTM|GRU|RNN)$")


def has_mode_layers(facts: Facts) -> bool:
    """Whether the script makes layers that compute otherwise in training: dropout, batch norm."""
    return any(
        _MODES.search(facts.meaning(one))
        or (_RECURRENT.search(facts.meaning(one)) and _drops(facts, one))
        for one in facts.script.every_call
    )


def _drops(facts: Facts, recurrent: cst.Call) -> bool:
    """Whether dropout between its layers is written."""
    given = by_name(recurrent).get("dropout")
    return given is not None and facts.code(given) not in ("0", "0.0")
