"""Losses are added up, or kept, with their graphs.

Each one holds the graph of its batch, so memory grows with every turn.

Fix: add loss.item(), or loss.detach() to stay on the device.
Source: PyTorch FAQ, "My model reports out of memory: don't accumulate history across your training loop".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import Role, always, turns
from ..rule import Found, ScriptRule
from ..tensors import tensors_of


def check(facts: Facts) -> Iterator[Found]:
    tensors = tensors_of(facts)
    for turn in turns(facts):
        losses = {one.subject for one in turn.of(Role.BACKWARD)}
        inside = set(facts.script.within(turn.loop))
        used = " ".join(
            [
                *losses,
                *(facts.code(one.value) for one in facts.script.bindings if one.name in losses),
            ]
        )
        for node in always(facts):
            name, value = _kept(facts, node)
            if value is None or name in re.findall(r"[\w.]+", used):
                continue
            anew = [one for one in facts.script.bindings if one.name == name and one.node in inside]
            is_loss = any(
                isinstance(one, cst.Name) and one.value in losses for one in _terms(value)
            )
            if (
                is_loss
                and not anew
                and tensors.is_tensor(value)
                and not facts.is_in(node, "no_grad")
            ):
                yield Found(node, f"{facts.code(node)} keeps the graph of every turn")


def _kept(facts: Facts, node: cst.CSTNode) -> tuple[str, cst.BaseExpression | None]:
    """``total += loss`` and ``losses.append(loss)``: where it goes, and what."""
    if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign):
        return facts.code(node.target), node.value
    if isinstance(node, cst.Call) and facts.method(node) == "append" and len(positional(node)) == 1:
        return facts.code(facts.owner(node)), positional(node)[0]
    return "", None


def _terms(value: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(value, cst.BinaryOperation):
        return [*_terms(value.left), *_terms(value.right)]
    return [value]


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP, "total += loss"], before="total = 0.0"), looped([*STEP, "losses.append(loss)"], before="losses = []"),),
    healthy=(looped([*STEP, "total += loss.item()"], before="total = 0.0"), looped([*STEP, "total += loss.detach()"], before="total = 0.0"),),
)  # fmt: skip
