"""The loss of an evaluation is the mean of its batches' means.

The last batch is usually smaller but weighs as much as a full one: the result depends on the batch
size and is not the mean over the data.

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

_KEEPS_MEAN = {"item", "detach", "cpu", "data"}


def check(facts: Facts) -> Iterator[Found]:
    script = facts.script
    training = {turn.loop for turn in turns(facts)}
    for node in script.nodes:
        if not isinstance(node, cst.AugAssign) or not isinstance(node.operator, cst.AddAssign):
            continue
        loop = next((outer for outer in script.up(node) if isinstance(outer, AnyLoop)), None)
        if not isinstance(loop, cst.For) or loop in training or not _is_evaluated(facts, node):
            continue
        iterated = facts.steps.iterated(loop)
        if iterated is None or not _is_mean(facts, node.value) or _is_even(facts, loop):
            continue
        total, loader = facts.code(node.target), facts.code(iterated)
        for division in _divisions(facts, node, total, loader):
            yield Found(division, f"{facts.code(division)} is a mean of the batches' means")


def _is_evaluated(facts: Facts, node: cst.CSTNode) -> bool:
    return facts.is_in(node, r"no_grad$|inference_mode$")


def _is_mean(facts: Facts, value: cst.BaseExpression) -> bool:
    """Whether a value is a loss with torch's default reduction, also as ``loss.item()``."""
    while True:
        if isinstance(value, cst.Call) and facts.method(value) in _KEEPS_MEAN and not value.args:
            value = facts.owner(value)
        elif isinstance(value, cst.Call) and facts.meaning(value) == "float" and value.args:
            value = value.args[0].value
        else:
            break
    losses = [value] if isinstance(value, cst.Call) else _last_bound(facts, value)
    return bool(losses) and all(_is_reduced(facts, loss) for loss in losses)


def _last_bound(facts: Facts, value: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return what was last assigned to a name before it is used, as a list of at most one value."""
    if not isinstance(value, cst.Name):
        return []
    order, scope = facts.script.order, facts.script.scope(value)
    bindings = [
        binding for binding in facts.flow.bindings(value.value, facts.flow.home(value.value, scope))
        if order[binding.node] < order[value] and binding.place is None
    ]  # fmt: skip
    return [max(bindings, key=lambda binding: order[binding.node]).value] if bindings else []


def _is_reduced(facts: Facts, call: cst.BaseExpression) -> bool:
    if not isinstance(call, cst.Call) or not facts.loss_kind(call):
        return False
    calls = [call, *facts.constructors(call.func)]
    names = {name for maker in calls for name in by_name(maker)}
    return not names & {"reduction", "size_average", "reduce"}


def _is_even(facts: Facts, loop: cst.For) -> bool:
    """Whether all batches of a loop are known to have the same size."""
    return any(
        literal(by_name(loader).get("drop_last")) == "True" or facts.batch_size(loader) == 1
        for loader in facts.loaders_of_loop(loop)
    )


def _divisions(
    facts: Facts, node: cst.CSTNode, total: str, loader: str
) -> Iterator[cst.BinaryOperation]:
    """Yield each ``total / len(loader)`` after a node, in its function."""
    script, scope = facts.script, facts.script.scope(node)
    length = rf"len\({re.escape(loader)}\)"
    for division in script.nodes:
        if not isinstance(division, cst.BinaryOperation):
            continue
        if not isinstance(division.operator, cst.Divide) or script.scope(division) is not scope:
            continue
        is_after = script.order[division] > script.order[node]
        dividend = re.sub(r"\.(item|cpu|detach)\(\)|float\(|\)$", "", facts.code(division.left))
        if is_after and dividend == total and re.fullmatch(length, facts.code(division.right)):
            yield division


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
