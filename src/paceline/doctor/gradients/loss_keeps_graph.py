"""Losses are summed or stored with their graphs.

Each one keeps the graph of its batch, so memory grows with every iteration.

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
        losses = {name for event in turn.of(CallRole.BACKWARD) for name in _names(event.subject)}
        used = {source for name in losses for source in _source_names(facts, name)} | losses
        nodes = set(facts.script.within(turn.loop))
        for node in always_reached(facts):
            name, value = _kept(facts, node)
            kept_losses = [
                term
                for term in (_terms(value) if value is not None else ())
                if isinstance(term, cst.Name) and term.value in losses
            ]
            if not kept_losses or name in used:
                continue
            is_reassigned = any(
                binding.name == name and binding.node in nodes and binding.node is not node
                for binding in facts.script.bindings
            )
            has_graph = any(tensors.is_tensor(loss) for loss in kept_losses)
            if has_graph and not is_reassigned and not facts.is_in(node, "no_grad"):
                yield Found(node, f"{facts.code(node)} keeps the graph of every iteration")


def _names(code: str) -> set[str]:
    return set(re.findall(r"[\w.]+", code))


def _source_names(facts: Facts, name: str) -> set[str]:
    """Return the names that the values assigned to a name are computed from."""
    sources = set()
    for binding in facts.script.bindings:
        if binding.name == name:
            sources |= _names(facts.code(binding.value))
    return sources


def _kept(facts: Facts, node: cst.CSTNode) -> tuple[str, cst.BaseExpression | None]:
    """Return the name that keeps a value, and the value: ``total += loss``, ``all.append(loss)``."""
    if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign):
        return facts.code(node.target), node.value
    if isinstance(node, cst.Call) and facts.method(node) == "append" and len(positional(node)) == 1:
        return facts.code(facts.owner(node)), positional(node)[0]
    if isinstance(node, cst.Assign) and isinstance(node.value, cst.BinaryOperation):
        name = facts.code(node.targets[0].target)
        terms = [facts.code(term) for term in _terms(node.value)]
        if isinstance(node.value.operator, cst.Add) and name in terms:
            return name, node.value
    return "", None


def _terms(value: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(value, cst.BinaryOperation):
        return [*_terms(value.left), *_terms(value.right)]
    if isinstance(value, cst.List | cst.Tuple):
        return [element.value for element in value.elements]
    return [value]


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """Write ``detach()`` after each term that is a tensor."""
    name, value = _kept(facts, node)
    tensors = tensors_of(facts)
    for term in _terms(value) if value is not None else ():
        if facts.code(term) != name and isinstance(term, cst.Name) and tensors.is_tensor(term):
            edits.replace(term, f"{facts.code(term)}.detach()")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP, "total += loss"], before="total = 0.0"), looped([*STEP, "losses.append(loss)"], before="losses = []"),),
    healthy=(looped([*STEP, "total += loss.item()"], before="total = 0.0"), looped([*STEP, "total += loss.detach()"], before="total = 0.0"),),
    mend=mend,
)  # fmt: skip
