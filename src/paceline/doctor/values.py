"""Numbers and shapes that a text says outright: ``64``, ``hidden * 2``, ``torch.randn(128, 15)``.

A name counts only where it is bound once. This module must not know what is asked with them.
"""

import libcst as cst

from ..porting.dataflow import Flow, parameters
from ..porting.tree import by_name, positional

_MADE = ("torch.randn", "torch.rand", "torch.zeros", "torch.ones", "torch.empty")
_DEPTH = 6


def single(flow: Flow, expr: cst.BaseExpression, depth: int = 0) -> cst.BaseExpression:
    """What a name that is bound once in its scope stands for; else the expression itself."""
    if not isinstance(expr, cst.Name) or depth > _DEPTH:
        return expr
    home = flow.home(expr.value, flow.script.scope(expr))
    bound = flow.bindings(expr.value, home)
    if len(bound) != 1 or bound[0].place is not None or expr.value in parameters(home):
        return expr
    if any(
        isinstance(one, cst.AugAssign) and flow.script.code(one.target) == expr.value
        for one in flow.script.nodes
    ):
        return expr
    return single(flow, bound[0].value, depth + 1)


def number(flow: Flow, expr: cst.BaseExpression | None, depth: int = 0) -> int | None:
    """A whole number; None: the text does not say it."""
    if expr is None or depth > _DEPTH:
        return None
    expr = single(flow, expr)
    if isinstance(expr, cst.Integer):
        return expr.evaluated_value
    if isinstance(expr, cst.BinaryOperation):
        left, right = (number(flow, one, depth + 1) for one in (expr.left, expr.right))
        if left is None or right is None:
            return None
        if isinstance(expr.operator, cst.Add):
            return left + right
        if isinstance(expr.operator, cst.Subtract):
            return left - right
        if isinstance(expr.operator, cst.Multiply):
            return left * right
        if isinstance(expr.operator, cst.FloorDivide) and right:
            return left // right
    return None


def pair(flow: Flow, expr: cst.BaseExpression | None, default: int) -> tuple[int, int] | None:
    """``3`` or ``(3, 5)``; ``default`` where nothing is written."""
    if expr is None:
        return default, default
    if isinstance(expr, cst.Tuple):
        both = [number(flow, one.value) for one in expr.elements]
        if len(both) == 2 and both[0] is not None and both[1] is not None:
            return both[0], both[1]
        return None
    one = number(flow, expr)
    return None if one is None else (one, one)


def literal(expr: cst.BaseExpression | None) -> str | None:
    """A text, or ``True``, ``False`` and ``None``, as written."""
    if isinstance(expr, cst.SimpleString):
        value = expr.evaluated_value
        return value if isinstance(value, str) else None
    return expr.value if isinstance(expr, cst.Name) else None


def shape(flow: Flow, expr: cst.BaseExpression) -> tuple[int, ...] | None:
    """The sizes of a tensor that is made with numbers; None: the text does not say them."""
    made = single(flow, expr)
    if not isinstance(made, cst.Call) or flow.script.meaning(made.func) not in _MADE:
        return None
    if by_name(made).get("size") is not None:
        return None
    given = positional(made)
    if len(given) == 1 and isinstance(given[0], cst.Tuple):
        given = [one.value for one in given[0].elements]
    sizes = [number(flow, one) for one in given]
    if not sizes or any(one is None for one in sizes):
        return None
    return tuple(one for one in sizes if one is not None)
