"""A loss is computed from an output that was rounded to 0 and 1.

A comparison has no gradient: this part of the loss changes no parameter.

Fix: compute the loss from the probabilities, and the threshold for the metric only.
Source: Milletari, Navab, Ahmadi, V-Net, 2016, section 3: a dice loss of probabilities.
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.dataflow import parameters
from ...porting.tree import positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, turns
from ..lineage import gradient_paths, last_value, loss_of
from ..rule import Found, ScriptRule

_KEEPS_VALUES = {"float", "double", "squeeze", "view", "reshape", "flatten", "to"}


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        for event in turn.of(CallRole.BACKWARD):
            if facts.method(event.call) != "backward":
                continue
            for call in _terms(facts, loss_of(facts, event.call)):
                yield from _in_function(facts, call)
                arguments = positional(call)
                if facts.loss_kind(call) and arguments and _is_rounded(facts, arguments[0]):
                    yield Found(call, f"{facts.code(call)} has no gradient")


def _terms(facts: Facts, expr: cst.BaseExpression, depth: int = 0) -> Iterator[cst.Call]:
    """Yield the calls whose results a loss is the sum of."""
    if isinstance(expr, cst.BinaryOperation):
        yield from _terms(facts, expr.left, depth)
        yield from _terms(facts, expr.right, depth)
    elif isinstance(expr, cst.Call):
        yield expr
    elif isinstance(expr, cst.Name) and depth < 4:
        value = last_value(facts, expr)
        if value is not None:
            yield from _terms(facts, value, depth + 1)


def _in_function(facts: Facts, call: cst.Call) -> Iterator[Found]:
    """Yield where a function of the script rounds the output before anything else."""
    function = facts.flow.function_of(call)
    if function is None or not isinstance(function.body, cst.IndentedBlock):
        return
    names = parameters(function)
    arguments = dict(zip(names, positional(call), strict=False))
    for line in function.body.body:
        statement = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
        if isinstance(statement, cst.Expr) and isinstance(statement.value, cst.SimpleString):
            continue
        if not isinstance(statement, cst.Assign):
            return
        name = facts.code(statement.targets[0].target)
        is_output = name in arguments and any(True for _ in gradient_paths(facts, arguments[name]))
        if is_output and _rounds(facts, statement.value, name):
            yield Found(statement, f"{facts.code(statement)}: {name} has no gradient from here on")


def _rounds(facts: Facts, expr: cst.BaseExpression, name: str) -> bool:
    """Whether a value is ``(name > 0.5).float()`` or ``name.round()``."""
    while isinstance(expr, cst.Call) and facts.method(expr) in _KEEPS_VALUES:
        expr = facts.owner(expr)
    if isinstance(expr, cst.Comparison):
        return _root(facts, expr.left) == name
    if isinstance(expr, cst.Call) and facts.method(expr) == "round":
        return _root(facts, facts.owner(expr)) == name
    return False


def _root(facts: Facts, expr: cst.BaseExpression) -> str:
    """Return ``p`` of ``torch.sigmoid(p)`` or ``p.sigmoid()``."""
    while isinstance(expr, cst.Call):
        arguments = positional(expr)
        expr = arguments[0] if arguments and facts.meaning(expr).startswith("torch.") else expr.func
        expr = expr.value if isinstance(expr, cst.Attribute) else expr
    return facts.code(expr)


def _is_rounded(facts: Facts, expr: cst.BaseExpression) -> bool:
    """Whether a value is a rounded model output, or a comparison of one."""
    for _ in range(4):
        while isinstance(expr, cst.Call) and facts.method(expr) in _KEEPS_VALUES:
            expr = facts.owner(expr)
        if not isinstance(expr, cst.Name):
            break
        value = last_value(facts, expr)
        if value is None:
            return False
        expr = value
    if isinstance(expr, cst.Call) and (
        facts.method(expr) == "round" or facts.meaning(expr) == "torch.round"
    ):
        inner = positional(expr)[:1] or [facts.owner(expr)]
        return any(True for _ in gradient_paths(facts, inner[0]))
    return isinstance(expr, cst.Comparison) and any(True for _ in gradient_paths(facts, expr.left))


_DICE = """def dice(p, y):
    {}
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())
"""
_BOTH = [*STEP[:2], "out = model(x)", "loss = loss_fn(out, y) + dice(out, y)", *STEP[3:]]
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(_BOTH, before=_DICE.format("p = (p > 0.5).float()")),
        looped(_BOTH, before=_DICE.format("p = torch.sigmoid(p).round()")).replace("torch.sigmoid(p).round()", "p.round()"),
        looped([*STEP[:2], "out = (model(x) > 0.5).float()", "loss = F.mse_loss(out, y)", *STEP[3:]]),
    ),
    healthy=(
        looped(_BOTH, before=_DICE.format("p = torch.sigmoid(p)")),
        looped(_BOTH, before=_DICE.format("y = (y > 0.5).float()")),
        looped(_BOTH, before=_DICE.format("mask = (p > 0.5).float()\n    p = p * mask")),
        looped([*STEP, "score = dice(model(x), y)"], before=_DICE.format("p = (p > 0.5).float()")),
    ),
)  # fmt: skip
