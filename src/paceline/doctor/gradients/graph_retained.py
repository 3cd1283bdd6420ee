"""The graph is kept after the only backward() of an iteration.

Its activations stay in memory until the next iteration; if it is needed to avoid an error, the
graph of the previous iteration is still attached and grows.

Fix: leave retain_graph out, and detach what is carried from one iteration to the next.
Source: torch.Tensor.backward documentation, retain_graph: "in nearly all cases not needed".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, Event, TrainingTurn, turns
from ..lineage import gradient_paths, loss_of
from ..mends import remove_argument
from ..rule import Found, ScriptRule

_FACTORIES = re.compile(r"^torch\.(rand|zeros|ones|tensor|full|empty|arange)")


def check(facts: Facts) -> Iterator[Found]:
    if "create_graph" in facts.uncommented:
        return
    for turn in turns(facts):
        backward = turn.of(CallRole.BACKWARD)
        first = backward[0]
        if not first.is_always or not _retains(facts, first) or _is_used_again(facts, first):
            continue
        if len(backward) == 1:
            yield Found(first.call, f"{facts.code(first.call)} once in each iteration")
        elif all(_has_own_graph(facts, turn, first, other) for other in backward[1:]):
            yield Found(
                first.call,
                f"{facts.code(first.call)}, but no other backward() of the iteration needs its graph",
            )


def _is_used_again(facts: Facts, event: Event) -> bool:
    """Whether autograd.grad() may go through the graph of a backward pass after it."""
    order = facts.script.order
    for call in facts.script.calls("autograd.grad"):
        sites = facts.flow.calls_of(facts.script.scope(call))
        positions = [order[site.node] for site in sites] or [order[call]]
        if max(positions) > order[event.call]:
            return True
    return False


def _has_own_graph(facts: Facts, turn: TrainingTurn, first: Event, other: Event) -> bool:
    """Whether a loss depends on nothing that was computed before the first backward()."""
    script, order = facts.script, facts.script.order
    scope = script.scope(first.call)
    if script.scope(other.call) is not scope or facts.method(other.call) != "backward":
        return False
    start, end = order[turn.loop], order[first.call]
    pending: list[cst.CSTNode] = [loss_of(facts, other.call)]
    seen: set[cst.CSTNode] = set()
    while pending:
        for name in script.within(pending.pop()):
            if not isinstance(name, cst.Name) or name in seen:
                continue
            seen.add(name)
            bindings = [
                binding for binding in facts.flow.bindings(name.value, scope)
                if start < order[binding.node] < order[name]
            ]  # fmt: skip
            last = max(bindings, key=lambda binding: order[binding.node], default=None)
            if last is None:
                continue
            if order[last.node] > end:
                pending.append(last.value)
            elif not _has_no_graph(facts, last.value):
                return False
    return any(True for _ in gradient_paths(facts, loss_of(facts, other.call)))


def _has_no_graph(facts: Facts, value: cst.BaseExpression) -> bool:
    """Whether a value is a tensor that torch makes, or a batch that is moved."""
    if not isinstance(value, cst.Call):
        return False
    is_moved = facts.method(value) in ("to", "cuda") and isinstance(facts.owner(value), cst.Name)
    return is_moved or _FACTORIES.search(facts.meaning(value)) is not None


def _retains(facts: Facts, event: Event) -> bool:
    return facts.flag(event.call, "retain_graph")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(
        looped([*STEP[:3], "loss.backward(retain_graph=True)", STEP[4]]),
        looped([*STEP[:3], "loss.backward(retain_graph=True)", STEP[4], "second = loss_fn(model(x), y)", "second.backward()"]),
    ),
    healthy=(
        looped([*STEP[:2], "out = model(x)", "loss = loss_fn(out, y)", "loss.backward(retain_graph=True)", "second = out.mean()", "second.backward()", STEP[4]]),
        looped(), looped([*STEP[:3], "loss.backward(retain_graph=True)", "(loss * 2).backward()", STEP[4]]),),
    mend=remove_argument("retain_graph"),
)  # fmt: skip
