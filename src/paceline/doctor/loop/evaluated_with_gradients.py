"""An evaluation records a graph for every batch.

The graph is never used, and holds the activations of a batch in memory.

Fix: with torch.no_grad(): (or torch.inference_mode()) around it.
Source: PyTorch performance tuning guide, "Disable gradient calculation for validation or inference".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_NO_GRADIENTS = r"no_grad$|inference_mode$|set_grad_enabled$"
_USES = re.compile(
    r"backward\(|autograd\.grad|requires_grad|set_grad_enabled\(False|\.step\(|perturb"
)


def check(facts: Facts) -> Iterator[Found]:
    order = facts.script.order
    for call in facts.methods("eval"):
        scope = facts.script.scope(call)
        if not facts.is_model(facts.owner(call)) or call.args:
            continue
        trains = [order[one] for one in facts.methods("train") if facts.script.scope(one) is scope]
        end = min((one for one in trains if one > order[call]), default=len(order))
        later = [
            one for one in facts.forward_calls()
            if order[call] < order[one] < end and facts.script.scope(one) is scope
        ]  # fmt: skip
        looped = [one for one in later if _is_in_data_loop(facts, one)]
        if not looped or any(facts.is_in(one, _NO_GRADIENTS) for one in later):
            continue
        if not _uses_gradients(facts, looped[0]):
            yield Found(looped[0], f"{facts.code(looped[0])} after eval(), and no no_grad()")


def _is_in_data_loop(facts: Facts, call: cst.Call) -> bool:
    return any(isinstance(one, cst.For) for one in facts.script.up(call))


def _uses_gradients(facts: Facts, call: cst.Call) -> bool:
    """Whether the loop that it stands in asks for them."""
    loops = [one for one in facts.script.up(call) if isinstance(one, cst.For)]
    return any(_USES.search(facts.code(one)) for one in loops)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(end="model.eval()\nfor x, y in loader:\n    correct = (model(x.to(device)).argmax(1) == y.to(device)).sum()"),),
    healthy=(looped(end="model.eval()\nwith torch.no_grad():\n    for x, y in loader:\n        correct = (model(x.to(device)).argmax(1) == y.to(device)).sum()"),),
)  # fmt: skip
