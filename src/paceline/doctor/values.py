"""Numbers, shapes and strings that a script writes out: ``64``, ``torch.randn(128, 15)``.

Arithmetic such as ``hidden * 2`` is computed; a name is followed only where it is bound once. This
module must not know what the values are for.
"""

import libcst as cst

from ..porting.dataflow import Flow, parameters
from ..porting.tree import by_name, positional

_FACTORIES = ("torch.randn", "torch.rand", "torch.zeros", "torch.ones", "torch.empty")
_DEPTH = 6


def single(flow: Flow, expr: cst.BaseExpression, depth: int = 0) -> cst.BaseExpression:
    """Return the value of a name that is bound once in its scope, or else the expression itself."""
    if not isinstance(expr, cst.Name) or depth > _DEPTH:
        return expr
    home = flow.home(expr.value, flow.script.scope(expr))
    bindings = flow.bindings(expr.value, home)
    if len(bindings) != 1 or bindings[0].place is not None or expr.value in parameters(home):
        return expr
    if any(
        isinstance(node, cst.AugAssign) and flow.script.code(node.target) == expr.value
        for node in flow.script.nodes
    ):
        return expr
    return single(flow, bindings[0].value, depth + 1)


def number(flow: Flow, expr: cst.BaseExpression | None, depth: int = 0) -> int | None:
    """Return a whole number, or None where the text does not say it."""
    if expr is None or depth > _DEPTH:
        return None
    expr = single(flow, expr)
    if isinstance(expr, cst.Integer):
        return expr.evaluated_value
    if isinstance(expr, cst.BinaryOperation):
        left, right = (number(flow, side, depth + 1) for side in (expr.left, expr.right))
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
    """Return two whole numbers written as ``(3, 5)``, or as ``3`` for both.

    Args:
        default: both numbers where the argument is not passed.
    """
    if expr is None:
        return default, default
    if isinstance(expr, cst.Tuple):
        numbers = [number(flow, element.value) for element in expr.elements]
        if len(numbers) == 2 and numbers[0] is not None and numbers[1] is not None:
            return numbers[0], numbers[1]
        return None
    value = number(flow, expr)
    return None if value is None else (value, value)


def literal(expr: cst.BaseExpression | None) -> str | None:
    """Return the value of a string literal, or a name as it is written, such as ``True``."""
    if isinstance(expr, cst.SimpleString):
        value = expr.evaluated_value
        return value if isinstance(value, str) else None
    return expr.value if isinstance(expr, cst.Name) else None


def shape(flow: Flow, expr: cst.BaseExpression) -> tuple[int, ...] | None:
    """Return the sizes of a tensor that a torch factory makes, or None if they are not written."""
    factory = single(flow, expr)
    if not isinstance(factory, cst.Call) or flow.script.meaning(factory.func) not in _FACTORIES:
        return None
    if by_name(factory).get("size") is not None:
        return None
    arguments = positional(factory)
    if len(arguments) == 1 and isinstance(arguments[0], cst.Tuple):
        arguments = [element.value for element in arguments[0].elements]
    sizes = [number(flow, argument) for argument in arguments]
    if not sizes or any(size is None for size in sizes):
        return None
    return tuple(size for size in sizes if size is not None)
