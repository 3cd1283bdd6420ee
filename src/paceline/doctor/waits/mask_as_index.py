"""A boolean mask on the device is used as an index in each iteration.

The number of selected elements is known only when the device has computed it, so the host waits for
the shape of the result.

Fix: torch.where, or for a loss a target that is ignored: targets.masked_fill(~mask, -100).
Source: torch.nonzero documentation: on CUDA it "causes host-device synchronization"; an index that is a mask is one.
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import always_reached
from ..rule import Found, ScriptRule
from ..tensors import Tensors, tensors_of

_MASKS = {"eq", "ne", "gt", "lt", "ge", "le", "bool", "isnan", "isfinite", "isinf", "logical_not",
          "logical_and", "logical_or"}  # fmt: skip
_DEPTH = 6


def check(facts: Facts) -> Iterator[Found]:
    tensors = tensors_of(facts)
    lines = set()
    for node in always_reached(facts) if facts.has_accelerator else ():
        if not _selects(facts, tensors, node):
            continue
        statement = facts.script.statement(node)
        if statement not in lines:
            lines.add(statement)
            yield Found(
                node,
                f"{facts.code(node)} waits for the number of selected elements in each iteration",
            )


def _selects(facts: Facts, tensors: Tensors, node: cst.CSTNode) -> bool:
    """Whether an expression selects numbers by a mask on a device."""
    if isinstance(node, cst.Call):
        is_read = facts.method(node) in ("masked_select", "nonzero")
        return is_read and tensors.is_tensor(facts.owner(node))
    if not isinstance(node, cst.Subscript) or len(node.slice) != 1 or _is_target(facts, node):
        return False
    index = node.slice[0].slice
    return (
        isinstance(index, cst.Index) and _is_mask(facts, index.value)
        and tensors.is_tensor(index.value)
    )  # fmt: skip


def _is_target(facts: Facts, node: cst.Subscript) -> bool:
    """Whether a subscript is assigned to, which does not wait."""
    return isinstance(facts.script.parents[node], cst.AssignTarget | cst.AugAssign)


def _is_mask(facts: Facts, expr: cst.BaseExpression, depth: int = 0) -> bool:
    if depth > _DEPTH:
        return False
    if isinstance(expr, cst.Comparison):
        return True
    if isinstance(expr, cst.UnaryOperation) and isinstance(expr.operator, cst.BitInvert):
        return _is_mask(facts, expr.expression, depth + 1)
    if isinstance(expr, cst.BinaryOperation):
        is_logical = isinstance(expr.operator, cst.BitAnd | cst.BitOr | cst.BitXor)
        return is_logical and any(
            _is_mask(facts, side, depth + 1) for side in (expr.left, expr.right)
        )
    if isinstance(expr, cst.Call):
        return facts.method(expr) in _MASKS
    if isinstance(expr, cst.Name):
        origins = facts.flow.origins(expr)
        return bool(origins) and all(
            origin is not expr and _is_mask(facts, origin, depth + 1) for origin in origins
        )
    return False


_MASK = "hide = (torch.rand(x.shape, device=x.device) < 0.15) & x.ne(0)"
RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(
        looped([*STEP[:2], _MASK, "loss = loss_fn(model(x)[hide], x[hide])", *STEP[3:]]),
        looped([*STEP[:2], "loss = loss_fn(model(x)[y != 3], y[y != 3])", *STEP[3:]]),
        looped([*STEP[:2], "loss = model(x).masked_select(x > 0).mean()", *STEP[3:]]),
    ),
    healthy=(
        looped([*STEP[:2], _MASK, "loss = loss_fn(model(x), y.masked_fill(~hide, -100))", *STEP[3:]]),
        looped([*STEP[:2], _MASK, "x[hide] = 0", *STEP[2:]]),
        looped([*STEP[:2], "loss = loss_fn(model(x)[y], y)", *STEP[3:]]),
    ),
)  # fmt: skip
