"""What the gradient of a value goes back through: the models that were called to make it.

    d_loss = D(G(z)).mean()      through D, and through G behind D
    d_loss = D(G(z).detach())    through D alone

A name stands for its last assignment before it; one that is made in a branch stands for nothing, so
that what is said here is certain. This module must not know rules.
"""

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from ..porting.tree import by_name, positional
from .facts import Facts

_DEPTH = 16
_CUTS = {"detach", "detach_", "item", "numpy", "tolist", "argmax", "size", "dim", "long", "int",
         "bool", "numel", "multinomial", "sample", "sign"}  # fmt: skip
"""Methods and functions of whose result no gradient goes back."""
_FACTS = {"shape", "device", "dtype", "data", "grad", "requires_grad", "ndim"}
_NO_GRADIENT = r"no_grad$|inference_mode$"


class GradientPath(NamedTuple):
    """A model that a gradient goes through.

    Attributes:
        call: of the model.
        behind: the calls of models that the gradient goes through before it, outermost first.
    """

    call: cst.Call
    behind: tuple[cst.Call, ...]


def passed(facts: Facts, expr: cst.BaseExpression) -> Iterator[GradientPath]:
    """Every model that a gradient of this value goes through."""
    yield from _passed(facts, expr, (), 0)


def _passed(
    facts: Facts, expr: cst.BaseExpression, behind: tuple[cst.Call, ...], depth: int
) -> Iterator[GradientPath]:
    if depth > _DEPTH:
        return
    if isinstance(expr, cst.Call):
        yield from _of_call(facts, expr, behind, depth)
    elif isinstance(expr, cst.Name):
        value = last_value(facts, expr)
        if value is not None and not facts.is_in(value, _NO_GRADIENT):
            yield from _passed(facts, value, behind, depth + 1)
    elif isinstance(expr, cst.Attribute):
        if expr.attr.value not in _FACTS:
            yield from _passed(facts, expr.value, behind, depth + 1)
    elif isinstance(expr, cst.BinaryOperation):
        for one in (expr.left, expr.right):
            yield from _passed(facts, one, behind, depth + 1)
    elif isinstance(expr, cst.UnaryOperation):
        yield from _passed(facts, expr.expression, behind, depth + 1)
    elif isinstance(expr, cst.Subscript):
        yield from _passed(facts, expr.value, behind, depth + 1)
    elif isinstance(expr, cst.Tuple | cst.List):
        for element in expr.elements:
            yield from _passed(facts, element.value, behind, depth + 1)


def _of_call(
    facts: Facts, call: cst.Call, behind: tuple[cst.Call, ...], depth: int
) -> Iterator[GradientPath]:
    method = facts.method(call)
    if method in _CUTS or facts.is_in(call, _NO_GRADIENT):
        return
    is_model = isinstance(call.func, cst.Name | cst.Attribute) and facts.is_model(call.func)
    if is_model:
        yield GradientPath(call, behind)
        behind = (*behind, call)
    elif method:
        yield from _passed(facts, facts.owner(call), behind, depth + 1)
    for one in (*positional(call), *by_name(call).values()):
        yield from _passed(facts, one, behind, depth + 1)


def last_value(facts: Facts, name: cst.Name) -> cst.BaseExpression | None:
    """What a name was given last before it, certainly; None: nobody can say."""
    script = facts.script
    scope = script.scope(name)
    if facts.flow.home(name.value, scope) is not scope:
        return None
    order, own = script.order, script.statement(name)
    bound = [
        one for one in facts.flow.bindings(name.value, scope)
        if order[one.node] < order[name] and one.node is not own
    ]  # fmt: skip
    if not bound:
        return None
    last = max(bound, key=lambda one: order[one.node])
    around = set(script.up(name))
    is_sure = all(
        one in around or not isinstance(one, cst.If | cst.Try | cst.Match)
        for one in script.up(last.node)
    )
    return last.value if is_sure else None


def loss_of(facts: Facts, backward: cst.Call) -> cst.BaseExpression:
    """The loss of ``loss.backward()`` and of ``scaler.scale(loss).backward()``."""
    owner = facts.owner(backward)
    if isinstance(owner, cst.Call) and facts.method(owner) == "scale" and positional(owner):
        return positional(owner)[0]
    return owner


def networks(facts: Facts, optimizer: cst.BaseExpression) -> set[cst.Call]:
    """The calls that make the models an optimizer changes; empty: not said."""
    models = facts.steps.models(optimizer).values()
    made = [set(facts.made(one)) for one in models]
    return set().union(*made) if made and all(made) else set()
