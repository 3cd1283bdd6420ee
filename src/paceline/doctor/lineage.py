"""Find the models that the gradient of a value flows back through.

    d_loss = D(G(z)).mean()      through D, and through G behind D
    d_loss = D(G(z).detach())    through D alone

A name stands for its last assignment before it. A name that is assigned in a branch stands for
nothing, so that every path reported here is certain. This module must not know rules.
"""

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from ..porting.tree import by_name, positional
from .facts import Facts

_DEPTH = 16
_CUTS = {"detach", "detach_", "item", "numpy", "tolist", "argmax", "size", "dim", "long", "int",
         "bool", "numel", "multinomial", "sample", "sign"}  # fmt: skip
"""Methods and functions whose result passes no gradient back."""
_NO_GRADIENT_ATTRIBUTES = {"shape", "device", "dtype", "data", "grad", "requires_grad", "ndim"}
_NO_GRADIENT_CONTEXTS = r"no_grad$|inference_mode$"


class GradientPath(NamedTuple):
    """A call of a model that a gradient flows through.

    Attributes:
        call: the call of the model.
        behind: the calls of models that the gradient passes before this one, outermost first.
    """

    call: cst.Call
    behind: tuple[cst.Call, ...]


def gradient_paths(facts: Facts, expr: cst.BaseExpression) -> Iterator[GradientPath]:
    """Yield every call of a model that the gradient of a value flows through."""
    yield from _paths(facts, expr, (), 0)


def _paths(
    facts: Facts, expr: cst.BaseExpression, behind: tuple[cst.Call, ...], depth: int
) -> Iterator[GradientPath]:
    if depth > _DEPTH:
        return
    if isinstance(expr, cst.Call):
        yield from _paths_of_call(facts, expr, behind, depth)
    elif isinstance(expr, cst.Name):
        value = last_value(facts, expr)
        if value is not None and not facts.is_in(value, _NO_GRADIENT_CONTEXTS):
            yield from _paths(facts, value, behind, depth + 1)
    elif isinstance(expr, cst.Attribute):
        if expr.attr.value not in _NO_GRADIENT_ATTRIBUTES:
            yield from _paths(facts, expr.value, behind, depth + 1)
    elif isinstance(expr, cst.BinaryOperation):
        for side in (expr.left, expr.right):
            yield from _paths(facts, side, behind, depth + 1)
    elif isinstance(expr, cst.UnaryOperation):
        yield from _paths(facts, expr.expression, behind, depth + 1)
    elif isinstance(expr, cst.Subscript):
        yield from _paths(facts, expr.value, behind, depth + 1)
    elif isinstance(expr, cst.Tuple | cst.List):
        for element in expr.elements:
            yield from _paths(facts, element.value, behind, depth + 1)


def _paths_of_call(
    facts: Facts, call: cst.Call, behind: tuple[cst.Call, ...], depth: int
) -> Iterator[GradientPath]:
    method = facts.method(call)
    if method in _CUTS or facts.is_in(call, _NO_GRADIENT_CONTEXTS):
        return
    is_model = isinstance(call.func, cst.Name | cst.Attribute) and facts.is_model(call.func)
    if is_model:
        yield GradientPath(call, behind)
        behind = (*behind, call)
    elif method:
        yield from _paths(facts, facts.owner(call), behind, depth + 1)
    for argument in (*positional(call), *by_name(call).values()):
        yield from _paths(facts, argument, behind, depth + 1)


def last_value(facts: Facts, name: cst.Name) -> cst.BaseExpression | None:
    """Return what was last assigned to a name before it is used, or None if that is uncertain."""
    script = facts.script
    scope = script.scope(name)
    if facts.flow.home(name.value, scope) is not scope:
        return None
    order, statement = script.order, script.statement(name)
    bindings = [
        binding for binding in facts.flow.bindings(name.value, scope)
        if order[binding.node] < order[name] and binding.node is not statement
    ]  # fmt: skip
    if not bindings:
        return None
    last = max(bindings, key=lambda binding: order[binding.node])
    ancestors = set(script.up(name))
    is_sure = all(
        node in ancestors or not isinstance(node, cst.If | cst.Try | cst.Match)
        for node in script.up(last.node)
    )
    return last.value if is_sure else None


def loss_of(facts: Facts, backward: cst.Call) -> cst.BaseExpression:
    """Return the loss of ``loss.backward()`` or ``scaler.scale(loss).backward()``."""
    owner = facts.owner(backward)
    if isinstance(owner, cst.Call) and facts.method(owner) == "scale" and positional(owner):
        return positional(owner)[0]
    return owner


def networks(facts: Facts, optimizer: cst.BaseExpression) -> set[cst.Call]:
    """Return the calls that make the models an optimizer updates; empty if any is unknown."""
    models = facts.steps.models(optimizer).values()
    constructors = [set(facts.constructors(model)) for model in models]
    return set().union(*constructors) if constructors and all(constructors) else set()
