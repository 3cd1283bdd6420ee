"""An evaluation records a graph for every batch.

The graph is never used, and holds the activations of a batch in memory.

Fix: with torch.no_grad(): (or torch.inference_mode()) around it.
Source: PyTorch performance tuning guide, "Disable gradient calculation for validation or inference".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import TreeEdits, imported
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule

_NO_GRADIENTS = r"no_grad$|inference_mode$|set_grad_enabled$"
_USES = re.compile(r"backward\(|autograd|requires_grad|\.grad\b|\.step\(|functional_call|vmap")


def check(facts: Facts) -> Iterator[Found]:
    if "set_grad_enabled(False)" in facts.uncommented or not turns(facts):
        return
    seen = set()
    for call in facts.forward_calls():
        loops = [one for one in facts.script.up(call) if isinstance(one, cst.For)]
        is_told = _is_evaluating(facts, call)
        over = next((one for one in loops if is_told or facts.loaders_of_loop(one)), None)
        if over is None or over in seen or facts.is_in(call, _NO_GRADIENTS):
            continue
        seen.add(over)
        if not _uses_gradients(facts, over, loops):
            yield Found(call, f"{facts.code(call)} in a loop that trains nothing, and no no_grad()")


def _is_evaluating(facts: Facts, call: cst.Call) -> bool:
    """Whether the last word on the mode before it, in its function, is eval()."""
    order, scope = facts.script.order, facts.script.scope(call)
    said = [
        one for one in facts.methods("eval", "train")
        if facts.script.scope(one) is scope and order[one] < order[call]
        and facts.is_model(facts.owner(one))
    ]  # fmt: skip
    last = max(said, key=lambda one: order[one], default=None)
    return last is not None and facts.method(last) == "eval" and not last.args


def _uses_gradients(facts: Facts, over: cst.For, loops: list[cst.For]) -> bool:
    """Whether anything in the loop, in its functions, or after it in a loop around, needs them."""
    script = facts.script
    reached = facts.flow.reached([over.body])
    if any(_USES.search(facts.code(one)) for one in reached):
        return True
    if any(isinstance(one, cst.Return | cst.Yield) for one in script.within(over.body)):
        return True
    outer = loops[loops.index(over) + 1 :]
    own = set(script.within(over))
    scope = script.scope(over)
    for one in facts.methods("backward"):
        around = [each for each in script.up(one) if isinstance(each, cst.For)]
        is_beside = script.scope(one) is scope and all(each in outer for each in around)
        if is_beside and one not in own:
            return True
    return False


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """The loop goes under ``torch.no_grad()``, where the script has the name ``torch``."""
    loops = [one for one in facts.script.up(node) if isinstance(one, cst.For)]
    over = next((one for one in loops if facts.loaders_of_loop(one)), None)
    if over is not None and _has_torch(facts):
        edits.wrap([over], "with torch.no_grad():")


def _has_torch(facts: Facts) -> bool:
    """Whether ``torch`` is a name of the module; ``import torch.nn as nn`` makes it none."""
    return any(
        name == "torch" == full.partition(".")[0]
        for one in facts.script.imports if isinstance(facts.script.scope(one), cst.Module)
        for _, name, full in imported(one)
    )  # fmt: skip


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(end="model.eval()\nfor x, y in loader:\n    correct = (model(x.to(device)).argmax(1) == y.to(device)).sum()"),),
    healthy=(looped(end="model.eval()\nwith torch.no_grad():\n    for x, y in loader:\n        correct = (model(x.to(device)).argmax(1) == y.to(device)).sum()"),),
    mend=mend,
)  # fmt: skip
