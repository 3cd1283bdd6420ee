"""What of a loop needs workers that step together, and is refused before the first step elsewhere.

    for g in optimizer.param_groups: g["lr"] = f(it)    a rate by hand, for each step
    if epoch <= warm: scheduler.step()                  a schedule that follows some steps only
    out, state = model(x, state)                        a state that goes from turn to turn, where
                                                        a turn's number chooses what is learnt

Under full-sync and local-sgd each worker comes by at each of these as one process does; where
whoever is free takes what comes next (k-sync, async and their kin) it does not. `prepare` is told
so by ``together=True``. This module must not know how a tree is edited.
"""

import re
from collections.abc import Iterator

import libcst as cst

from .counting import count_of
from .dataflow import Flow
from .loops import Stepping


def rates_by_hand(training: Stepping) -> Iterator[cst.CSTNode]:
    """Where a learning rate is set inside the loop."""
    flow = training.flow
    for one in flow.script.bindings:
        is_rate = re.search(r"""\[['"]lr['"]\]$""", one.name) is not None
        if is_rate and any(training.loop.node in way for way in flow.around(one.node)):
            yield one.node


def schedules_now_and_then(training: Stepping) -> Iterator[cst.CSTNode]:
    """Where a scheduler is stepped inside the loop, and not as often as its optimizers."""
    script, flow = training.flow.script, training.flow
    names = training.schedulers()
    around = {one for call, _ in training.steps for one in script.up(call)}
    for call in script.calls("step"):
        owner = script.code(call.func.value) if isinstance(call.func, cst.Attribute) else ""
        if owner not in names or not any(training.loop.node in way for way in flow.around(call)):
            continue
        tests = [
            one.test for one in script.up(call) if isinstance(one, cst.If) and one not in around
        ]
        if any(_compares(one) for test in tests for one in script.within(test)):
            yield call


def _compares(part: cst.CSTNode) -> bool:
    """Whether this tells some turns from others: ``epoch <= warm``, and not ``it is not None``."""
    if isinstance(part, cst.BinaryOperation):
        return isinstance(part.operator, cst.Modulo)
    signs = [one.operator for one in part.comparisons] if isinstance(part, cst.Comparison) else []
    return bool(signs) and not any(isinstance(one, cst.Is | cst.IsNot) for one in signs)


def carried_states(training: Stepping) -> Iterator[cst.Name]:
    """What goes from turn to turn in a loop without a loader, whose number chooses."""
    if training.loop.counts_updates and computes(training):
        yield from carried(training)


def carried(training: Stepping) -> Iterator[cst.Name]:
    """What a model is given, and a turn uses before it makes it: the turn before has made it."""
    flow, script, body = training.flow, training.flow.script, training.loop.node.body
    models = {text for each in training.optimizers.values() for text in training.models(each)}
    inside, seen = set(script.within(body)), set()
    for call in (one for one in script.within(body) if isinstance(one, cst.Call)):
        given = {script.code(one.value) for one in call.args}
        if script.code(call.func) not in models and not models & given:
            continue
        for one in (each for arg in call.args for each in script.within(arg)):
            if isinstance(one, cst.Name) and one.value not in seen:
                seen.add(one.value)
                if _is_made_later(flow, one, inside):
                    yield one


def _is_made_later(flow: Flow, name: cst.Name, inside: set[cst.CSTNode]) -> bool:
    """Whether the loop's body uses a name before, or where, it first gives it a value."""
    script, order = flow.script, flow.script.order
    bound = flow.bindings(name.value, flow.home(name.value, script.scope(name)))
    made = [one.node for one in bound if one.node in inside]
    if not made:
        return False
    first = min(made, key=order.__getitem__)
    there = set(script.within(first))
    return any(
        one in there or order[one] < order[first]
        for one in script.uses(name.value)
        if one in inside and not any(isinstance(up, cst.AssignTarget) for up in script.up(one))
    )


def computes(training: Stepping) -> cst.CSTNode | None:
    """Where a loop without a loader computes with the number of its turn; None: nowhere."""
    flow: Flow = training.flow
    return count_of(flow, training.loop.node, [call for call, _ in training.steps]).computes


def needs_together(training: Stepping) -> bool:
    """Whether `prepare` is to be told."""
    found = (rates_by_hand(training), schedules_now_and_then(training), carried_states(training))
    return any(next(one, None) is not None for one in found)
