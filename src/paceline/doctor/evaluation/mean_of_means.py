"""An evaluation's loss is the mean of its batches' means.

The last batch is mostly smaller, and weighs as much as a whole one: the figure depends on the batch
size, and is not that of the data.

Fix: add loss * len(y), and divide by the number of samples.
Source: torch.nn.CrossEntropyLoss documentation: reduction "mean" divides by the samples of the call.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.dataflow import AnyLoop
from ...porting.tree import by_name
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule
from ..values import literal

_READ = {"item", "detach", "cpu", "data"}


def check(facts: Facts) -> Iterator[Found]:
    script = facts.script
    training = {turn.loop for turn in turns(facts)}
    for node in script.nodes:
        if not isinstance(node, cst.AugAssign) or not isinstance(node.operator, cst.AddAssign):
            continue
        loop = next((one for one in script.up(node) if isinstance(one, AnyLoop)), None)
        if not isinstance(loop, cst.For) or loop in training or not _is_evaluated(facts, node):
            continue
        over = facts.steps.iterated(loop)
        if over is None or not _is_mean(facts, node.value) or _is_even(facts, loop):
            continue
        total, name = facts.code(node.target), facts.code(over)
        for one in _divisions(facts, node, total, name):
            yield Found(one, f"{facts.code(one)} is a mean of the batches' means")


def _is_evaluated(facts: Facts, node: cst.CSTNode) -> bool:
    return facts.is_in(node, r"no_grad$|inference_mode$")


def _is_mean(facts: Facts, value: cst.BaseExpression) -> bool:
    """Whether this is a loss as torch gives it, read or not."""
    while True:
        if isinstance(value, cst.Call) and facts.method(value) in _READ and not value.args:
            value = facts.owner(value)
        elif isinstance(value, cst.Call) and facts.meaning(value) == "float" and value.args:
            value = value.args[0].value
        else:
            break
    found = [value] if isinstance(value, cst.Call) else _last_bound(facts, value)
    return bool(found) and all(_is_reduced(facts, one) for one in found)


def _last_bound(facts: Facts, value: cst.BaseExpression) -> list[cst.BaseExpression]:
    """What a name was given last before it."""
    if not isinstance(value, cst.Name):
        return []
    order, scope = facts.script.order, facts.script.scope(value)
    bound = [
        one for one in facts.flow.bindings(value.value, facts.flow.home(value.value, scope))
        if order[one.node] < order[value] and one.place is None
    ]  # fmt: skip
    return [max(bound, key=lambda one: order[one.node]).value] if bound else []


def _is_reduced(facts: Facts, call: cst.BaseExpression) -> bool:
    if not isinstance(call, cst.Call) or not facts.loss_kind(call):
        return False
    makers = [call, *facts.constructors(call.func)]
    said = [by_name(one) for one in makers]
    return not any("reduction" in one or "size_average" in one or "reduce" in one for one in said)


def _is_even(facts: Facts, loop: cst.For) -> bool:
    """Whether the last batch is known to be none, or as large as the others."""
    loaders = facts.loaders_of_loop(loop)
    return any(
        literal(by_name(one).get("drop_last")) == "True" or facts.batch_size(one) == 1
        for one in loaders
    )


def _divisions(
    facts: Facts, node: cst.CSTNode, total: str, loader: str
) -> Iterator[cst.BinaryOperation]:
    """``total / len(loader)`` behind it, in its function."""
    script, scope = facts.script, facts.script.scope(node)
    length = rf"len\({re.escape(loader)}\)"
    for one in script.nodes:
        if not isinstance(one, cst.BinaryOperation) or not isinstance(one.operator, cst.Divide):
            continue
        is_there = script.scope(one) is scope and script.order[one] > script.order[node]
        above = re.sub(r"\.(item|cpu|detach)\(\)|float\(|\)$", "", facts.code(one.left))
        if is_there and above == total and re.fullmatch(length, facts.code(one.right)):
            yield one


_TOTAL = """
model.eval()
total = 0.0
with torch.no_grad():
    for x, y in loader:
        {}
print(total / len({}))
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(end=_TOTAL.format("total += F.cross_entropy(model(x), y)", "loader")),
        looped(end=_TOTAL.format("loss = loss_fn(model(x), y)\n        total += loss.item()", "loader")),
    ),
    healthy=(
        looped(end=_TOTAL.format("total += F.cross_entropy(model(x), y, reduction='sum')", "loader.dataset")),
        looped(end=_TOTAL.format("total += loss_fn(model(x), y).item() * len(y)", "loader")),
        looped(end=_TOTAL.format("total += (model(x).argmax(1) == y).float().mean()", "loader")),
        looped(end=_TOTAL.format("total += loss_fn(model(x), y).item()", "loader")).replace("shuffle=True", "drop_last=True"),
    ),
)  # fmt: skip
