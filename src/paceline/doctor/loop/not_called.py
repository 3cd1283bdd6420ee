"""A method is named but not called.

The line does nothing, or passes the method itself where its result was wanted.

Fix: add the parentheses.
Source: The Python Language Reference, section 6.3.4, Calls.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_STEPS = {"step", "zero_grad", "backward"}
_MODES = {"eval", "train"}
_CONTEXTS = re.compile(r"^torch\.(no_grad|inference_mode|enable_grad)$")
_OPTIMIZER = re.compile(r"(^|\.)optim\.[A-Z]\w*$")


def check(facts: Facts) -> Iterator[Found]:
    for node in facts.script.nodes:
        if isinstance(node, cst.Attribute) and _is_bare(facts, node):
            yield Found(node, f"{facts.code(node)} is not called")


def _is_bare(facts: Facts, node: cst.Attribute) -> bool:
    """Whether a method is named where only its result makes sense."""
    parent, name = facts.script.parents[node], node.attr.value
    if isinstance(parent, cst.Expr):
        return name in _STEPS or (name in _MODES and facts.is_model(node.value))
    if isinstance(parent, cst.WithItem):
        return _CONTEXTS.search(facts.script.meaning(node)) is not None
    if isinstance(parent, cst.AugAssign):
        return name == "item" and node is parent.value
    grandparent = facts.script.parents.get(parent)
    if isinstance(parent, cst.Arg) and isinstance(grandparent, cst.Call) and name == "parameters":
        is_first = positional(grandparent)[:1] == [node]
        return is_first and _OPTIMIZER.search(facts.meaning(grandparent)) is not None
    return False


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped([*STEP[:4], "optimizer.step"]), looped(["optimizer.zero_grad", *STEP]),
        looped(after="model.eval\nwith torch.no_grad():\n    out = model(x)"),
        looped(after="with torch.no_grad:\n    out = model(x)"),
        looped([*STEP, "total += loss.item"], before="total = 0.0"),
        looped(before="optimizer = torch.optim.Adam(model.parameters, lr=0.1)"),
    ),
    healthy=(
        looped(), looped(before="hooks = [optimizer.step, model.eval]\nstep = optimizer.step"),
        looped(before="print(loader.dataset.train)\nloader.dataset.train"),
    ),
)  # fmt: skip
