"""Losses are added up, or kept, with their graphs.

Each one holds the graph of its batch, so memory grows with every turn.

Fix: add loss.item(), or loss.detach() to stay on the device.
Source: PyTorch FAQ, "My model reports out of memory: don't accumulate history across your training loop".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import TreeEdits, positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, always_reached, turns
from ..rule import Found, ScriptRule
from ..tensors import tensors_of


def check(facts: Facts) -> Iterator[Found]:
    tensors = tensors_of(facts)
    for turn in turns(facts):
        losses = {word for one in turn.of(CallRole.BACKWARD) for word in _words(one.subject)}
        used = {word for name in losses for word in _words_of(facts, name)} | losses
        inside = set(facts.script.within(turn.loop))
        for node in always_reached(facts):
            name, value = _kept(facts, node)
            if value is None or name in used or not any(_is(one, losses) for one in _terms(value)):
                continue
            is_anew = any(
                one.name == name and one.node in inside and one.node is not node
                for one in facts.script.bindings
            )
            is_live = any(_is(one, losses) and tensors.is_tensor(one) for one in _terms(value))
            if is_live and not is_anew and not facts.is_in(node, "no_grad"):
                yield Found(node, f"{facts.code(node)} keeps the graph of every turn")


def _is(value: cst.BaseExpression, names: set[str]) -> bool:
    return isinstance(value, cst.Name) and value.value in names


def _words(text: str) -> set[str]:
    return set(re.findall(r"[\w.]+", text))


def _words_of(facts: Facts, name: str) -> set[str]:
    """What the values of a name are made of."""
    found = set()
    for one in facts.script.bindings:
        if one.name == name:
            found |= _words(facts.code(one.value))
    return found


def _kept(facts: Facts, node: cst.CSTNode) -> tuple[str, cst.BaseExpression | None]:
    """Where it goes, and what: ``total += loss``, ``total = total + loss``, ``all.append(loss)``."""
    if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign):
        return facts.code(node.target), node.value
    if isinstance(node, cst.Call) and facts.method(node) == "append" and len(positional(node)) == 1:
        return facts.code(facts.owner(node)), positional(node)[0]
    if isinstance(node, cst.Assign) and isinstance(node.value, cst.BinaryOperation):
        name = facts.code(node.targets[0].target)
        terms = [facts.code(one) for one in _terms(node.value)]
        if isinstance(node.value.operator, cst.Add) and name in terms:
            return name, node.value
    return "", None


def _terms(value: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(value, cst.BinaryOperation):
        return [*_terms(value.left), *_terms(value.right)]
    if isinstance(value, cst.List | cst.Tuple):
        return [one.value for one in value.elements]
    return [value]


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """``detach()`` of each term that is a tensor."""
    name, value = _kept(facts, node)
    tensors = tensors_of(facts)
    for one in _terms(value) if value is not None else ():
        if facts.code(one) != name and isinstance(one, cst.Name) and tensors.is_tensor(one):
            edits.replace(one, f"{facts.code(one)}.detach()")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP, "total += loss"], before="total = 0.0"), looped([*STEP, "losses.append(loss)"], before="losses = []"),),
    healthy=(looped([*STEP, "total += loss.item()"], before="total = 0.0"), looped([*STEP, "total += loss.detach()"], before="total = 0.0"),),
    mend=mend,
)  # fmt: skip
