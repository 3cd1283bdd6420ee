"""An evaluation records a graph for every batch.

The graph is never used, and it keeps the activations of a batch in memory.

Fix: with torch.no_grad(): (or torch.inference_mode()) around it.
Source: PyTorch performance tuning guide, "Disable gradient calculation for validation or inference".
"""

import builtins
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
_KNOWN = re.compile(r"^(torch(?!\.func\b|\.autograd\b)|torchvision|torchmetrics|copy)\.")
"""Packages whose functions compute no gradient of a model that they are given."""
_USES = re.compile(r"backward\(|autograd|requires_grad|\.grad\b|\.step\(|functional_call|vmap")


def check(facts: Facts) -> Iterator[Found]:
    if "set_grad_enabled(False)" in facts.uncommented or not turns(facts):
        return
    seen = set()
    for call in facts.forward_calls():
        loops = [node for node in facts.script.up(call) if isinstance(node, cst.For)]
        is_evaluating = _is_evaluating(facts, call)
        loop = next((loop for loop in loops if is_evaluating or facts.loaders_of_loop(loop)), None)
        if loop is None or loop in seen or facts.is_in(call, _NO_GRADIENTS):
            continue
        seen.add(loop)
        if not _uses_gradients(facts, loop, loops):
            yield Found(
                call, f"{facts.code(call)} in a loop that trains nothing, without no_grad()"
            )


def _is_evaluating(facts: Facts, call: cst.Call) -> bool:
    """Whether the last eval() or train() before a call, in its function, is eval()."""
    order, scope = facts.script.order, facts.script.scope(call)
    mode_calls = [
        mode for mode in facts.methods("eval", "train")
        if facts.script.scope(mode) is scope and order[mode] < order[call]
        and facts.is_model(facts.owner(mode))
    ]  # fmt: skip
    last = max(mode_calls, key=lambda mode: order[mode], default=None)
    return last is not None and facts.method(last) == "eval" and not last.args


def _uses_gradients(facts: Facts, loop: cst.For, loops: list[cst.For]) -> bool:
    """Whether a loop needs gradients: it uses or returns them, or a loop around it does, after it.

    Args:
        loops: the loops around a call in it, innermost first; ``loop`` is one of them.
    """
    script = facts.script
    reached = facts.flow.reached([loop.body])
    if any(_USES.search(facts.code(block)) for block in reached):
        return True
    if any(_is_unknown(facts, node) for block in reached for node in script.within(block)):
        return True
    if any(isinstance(node, cst.Return | cst.Yield) for node in script.within(loop.body)):
        return True
    outer = loops[loops.index(loop) + 1 :]
    nodes = set(script.within(loop))
    scope = script.scope(loop)
    for call in facts.methods("backward"):
        around = [node for node in script.up(call) if isinstance(node, cst.For)]
        is_beside = script.scope(call) is scope and all(node in outer for node in around)
        if is_beside and call not in nodes:
            return True
    return False


def _is_unknown(facts: Facts, node: cst.CSTNode) -> bool:
    """Whether a call of unknown code is given a model: ``pgd(model, x, y)``, ``PGD(model)(x, y)``."""
    if not isinstance(node, cst.Call) or facts.is_model(node.func):
        return False
    maker = facts.owner(node) if facts.method(node) else node.func
    calls = [node, *(made for made in facts.flow.origins(maker) if isinstance(made, cst.Call))]
    return any(_takes_model(facts, call) for call in calls)


def _takes_model(facts: Facts, call: cst.Call) -> bool:
    """Whether a call passes a model, or a method of one, to neither torch nor the script."""
    name = facts.meaning(call)
    is_own = facts.flow.function_of(call) is not None or name in facts.flow.classes
    if is_own or name in vars(builtins) or _KNOWN.search(name):
        return False
    given = [argument.value for argument in call.args]
    given += [value.value for value in given if isinstance(value, cst.Attribute)]
    return any(facts.is_model(value) for value in given)


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """Put the loop under ``torch.no_grad()``, if the script has the name ``torch``."""
    loops = [ancestor for ancestor in facts.script.up(node) if isinstance(ancestor, cst.For)]
    loop = next((loop for loop in loops if facts.loaders_of_loop(loop)), None)
    if loop is not None and _has_torch(facts):
        edits.wrap([loop], "with torch.no_grad():")


def _has_torch(facts: Facts) -> bool:
    """Whether the module binds the name ``torch``; ``import torch.nn as nn`` does not."""
    return any(
        name == "torch" == full.partition(".")[0]
        for line in facts.script.imports if isinstance(facts.script.scope(line), cst.Module)
        for _, name, full in imported(line)
    )  # fmt: skip


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(end="model.eval()\nfor x, y in loader:\n    correct = (model(x.to(device)).argmax(1) == y.to(device)).sum()"),),
    healthy=(
        looped(end="model.eval()\nwith torch.no_grad():\n    for x, y in loader:\n        correct = (model(x.to(device)).argmax(1) == y.to(device)).sum()"),
        looped(before="from attacks import pgd", end="model.eval()\nfor x, y in loader:\n    correct = (model(pgd(model, x, y)).argmax(1) == y).sum()"),
        looped(before="from attacks import pgd", end="model.eval()\nfor x, y in loader:\n    correct = (model(pgd(model.forward, x, y)).argmax(1) == y).sum()"),
        looped(before="import torchattacks\nattack = torchattacks.PGD(model)", end="model.eval()\nfor x, y in loader:\n    correct = (model(attack(x, y)).argmax(1) == y).sum()"),
    ),
    mend=mend,
)  # fmt: skip
