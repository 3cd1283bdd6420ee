"""Finds what in a loop needs workers that step together, which other protocols must refuse.

    for g in optimizer.param_groups: g["lr"] = f(it)    a learning rate set by hand for each step
    if epoch <= warm: scheduler.step()                  a schedule that follows only some steps
    out, state = model(x, state)                        a state carried from turn to turn, if a
                                                        turn's number chooses what is learnt

Under full-sync and local-sgd each worker passes each of these as one process does; if a free worker
takes whatever comes next (k-sync, async and the like), it does not. ``together=True`` tells
`prepare`, which then refuses such protocols before the first step. This module must not know how a
tree is edited.
"""

import re
from collections.abc import Iterator

import libcst as cst

from .counting import count_of
from .dataflow import Flow
from .loops import Stepping


def rates_by_hand(training: Stepping) -> Iterator[cst.CSTNode]:
    """Yield the assignments to learning rates inside the loop."""
    flow = training.flow
    for binding in flow.script.bindings:
        is_rate = re.search(r"""\[['"]lr['"]\]$""", binding.name) is not None
        if is_rate and any(training.loop.node in way for way in flow.around(binding.node)):
            yield binding.node


def schedules_now_and_then(training: Stepping) -> Iterator[cst.CSTNode]:
    """Yield the steps of schedulers inside the loop that are rarer than its optimizers' steps."""
    script, flow = training.flow.script, training.flow
    names = training.schedulers()
    around = {ancestor for call, _ in training.steps for ancestor in script.up(call)}
    for call in script.calls("step"):
        owner = script.code(call.func.value) if isinstance(call.func, cst.Attribute) else ""
        if owner not in names or not any(training.loop.node in way for way in flow.around(call)):
            continue
        tests = [
            ancestor.test
            for ancestor in script.up(call)
            if isinstance(ancestor, cst.If) and ancestor not in around
        ]
        if any(_compares(part) for test in tests for part in script.within(test)):
            yield call


def _compares(part: cst.CSTNode) -> bool:
    """Whether this distinguishes turns: ``epoch <= warm``, but not ``it is not None``."""
    if isinstance(part, cst.BinaryOperation):
        return isinstance(part.operator, cst.Modulo)
    signs = (
        [comparison.operator for comparison in part.comparisons]
        if isinstance(part, cst.Comparison)
        else []
    )
    return bool(signs) and not any(isinstance(sign, cst.Is | cst.IsNot) for sign in signs)


def carried_states(training: Stepping) -> Iterator[cst.Name]:
    """Yield what is carried from turn to turn in a loop that computes with the turn's number."""
    if training.loop.counts_updates and computes(training):
        yield from carried(training)


def carried(training: Stepping) -> Iterator[cst.Name]:
    """Yield names that a model is called with, and that the turn before has made."""
    flow, script, body = training.flow, training.flow.script, training.loop.node.body
    models = {
        text for optimizer in training.optimizers.values() for text in training.models(optimizer)
    }
    inside, seen = set(script.within(body)), set()
    for call in (node for node in script.within(body) if isinstance(node, cst.Call)):
        arguments = {script.code(argument.value) for argument in call.args}
        if script.code(call.func) not in models and not models & arguments:
            continue
        for node in (part for arg in call.args for part in script.within(arg)):
            if isinstance(node, cst.Name) and node.value not in seen:
                seen.add(node.value)
                if _is_made_later(flow, node, inside):
                    yield node


def _is_made_later(flow: Flow, name: cst.Name, inside: set[cst.CSTNode]) -> bool:
    """Whether the loop's body uses a name before, or in, its first assignment."""
    script, order = flow.script, flow.script.order
    bound = flow.bindings(name.value, flow.home(name.value, script.scope(name)))
    assignments = [binding.node for binding in bound if binding.node in inside]
    if not assignments:
        return False
    first = min(assignments, key=order.__getitem__)
    in_first = set(script.within(first))
    return any(
        use in in_first or order[use] < order[first]
        for use in script.uses(name.value)
        if use in inside
        and not any(isinstance(ancestor, cst.AssignTarget) for ancestor in script.up(use))
    )


def computes(training: Stepping) -> cst.CSTNode | None:
    """Return where a loop without a loader computes with the number of its turn, or None."""
    flow: Flow = training.flow
    return count_of(flow, training.loop.node, [call for call, _ in training.steps]).computes


def needs_together(training: Stepping) -> bool:
    """Whether `prepare` needs ``together=True``."""
    reasons = (rates_by_hand(training), schedules_now_and_then(training), carried_states(training))
    return any(next(reason, None) is not None for reason in reasons)
