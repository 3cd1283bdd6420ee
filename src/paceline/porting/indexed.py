"""A loop over indices inside the loop over epochs, whose numbers are shared among workers.

    for epoch in range(e):
        for i in range(0, len(data), b):     model, optimizer, numbers = pace.prepare(
            x = data[i : i + b]          ->      model, optimizer, range(0, len(data), b))
            ... optimizer.step()             for i in numbers: with pace.step(): ...

Each number is one worker's mini-batch and comes once per epoch; an update averages K of them. That
works only if every worker makes every pass, with the same data, and if no iteration needs what the
one before has made; loops for which this cannot be shown are refused. This module must not know how
a tree is edited.
"""

from collections.abc import Iterator

import libcst as cst

from .dataflow import AnyLoop, Flow, parameters
from .tree import CannotDerive, Scope, positional
from .uses import uses

_GROWS = (
    "append", "appendleft", "extend", "insert", "pop", "popleft", "remove", "clear", "put", "add",
    "push", "update",
)  # fmt: skip
_PASSES_ON = ("enumerate", "tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.notebook.tqdm", "tqdm")


def numbers_of(flow: Flow, loop: AnyLoop) -> cst.Call | None:
    """Return the ``range(...)`` that a loop goes over, also through ``enumerate`` and ``tqdm``."""
    iterated = loop.iter if isinstance(loop, cst.For) else None
    for _ in range(3):
        if not isinstance(iterated, cst.Call):
            return None
        name = flow.script.meaning(iterated.func)
        if name == "range":
            return iterated
        if name not in _PASSES_ON or not positional(iterated):
            return None
        iterated = positional(iterated)[0]
    return None


def target_of(flow: Flow, loop: cst.For) -> str:
    """Return what a loop calls its number: ``i`` of ``for batch, i in enumerate(range(...))``."""
    target: cst.BaseExpression = loop.target
    while isinstance(target, cst.Tuple) and target.elements:
        target = target.elements[-1].value
    return flow.script.code(target)


def refuse_indexed(flow: Flow, loop: cst.For, outer: list[AnyLoop], steps: list[cst.Call]) -> None:
    """Refuse loops whose numbers cannot be shared among workers.

    Raises:
        CannotDerive: the loop is such a loop.
    """
    script, name = flow.script, target_of(flow, loop)
    where = f"the loop of line {script.line(loop)}, inside that of line {script.line(outer[0])},"
    if all(is_progress for _, is_progress in uses(flow, name, loop.body)):
        raise CannotDerive(
            f"{where} takes nothing by {name}, so its iterations cannot be divided among workers; "
            "make one iteration of all of them: for number in pace.updates(n), with the steps in "
            "one loop inside with pace.step(): (full-sync, local-sgd)"
        )
    for test in _conditions(flow, loop, outer[0]):
        raise CannotDerive(
            f"{where} runs only if {script.code(test)} (line {script.line(test)}), which may "
            "differ between workers, but all workers share an epoch; run it always, or write one "
            "loop: for number in pace.updates(n)"
        )
    inside = set(script.within(loop.body))
    bindings = [binding for binding in script.bindings if binding.node in inside]
    changing_names = {name, *(binding.name for binding in bindings)}
    for call in steps:
        for ancestor in script.up(call):
            if (
                isinstance(ancestor, cst.If)
                and ancestor in inside
                and changing_names & script.inside(ancestor.test)
            ):
                raise CannotDerive(
                    f"line {script.line(call)} steps in some iterations only of {where[:-1]}, and "
                    "workers divide the iterations among them; make a DataLoader of what is taken "
                    f"by {name}, or put the batches of a step into one iteration"
                )
    _refuse_data(flow, loop, outer[0])


def _conditions(flow: Flow, node: cst.CSTNode, outer: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """Yield the condition of every ``if`` between a node and the epochs' loop, across functions."""
    for ancestor in flow.script.up(node):
        if ancestor is outer:
            return
        if isinstance(ancestor, cst.If):
            yield ancestor.test
    for call in flow.calls_of(flow.script.scope(node)):
        yield from _conditions(flow, call.node, outer)


def _refuse_data(flow: Flow, loop: cst.For, outer: cst.CSTNode) -> None:
    """Raise CannotDerive if the number of iterations may change from epoch to epoch."""
    script, call = flow.script, numbers_of(flow, loop)
    assert call is not None
    names = {
        part.value for arg in call.args for part in script.within(arg) if isinstance(part, cst.Name)
    }
    reached = flow.reached([outer])
    for node in (part for holder in reached for part in script.within(holder)):
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            continue
        root = script.code(node.func.value).partition(".")[0]
        if node.func.attr.value in _GROWS and root in names:
            raise CannotDerive(
                f"line {script.line(node)} changes {root}, which decides how long the loop of line "
                f"{script.line(loop)} is, but every epoch must have the same number of iterations "
                "in all workers; make a DataLoader of it"
            )


def check_visible(flow: Flow, loop: cst.For, goal: Scope, inside: set[cst.CSTNode]) -> None:
    """Raise CannotDerive if the range means something else, or nothing, at `prepare`.

    Args:
        goal: the function of `prepare`.
        inside: the nodes of the loop over epochs, which must not assign to names of the range.
    """
    script, call = flow.script, numbers_of(flow, loop)
    assert call is not None
    scope = script.scope(loop)
    for node in (part for arg in call.args for part in script.within(arg)):
        if not isinstance(node, cst.Name) or node.value in ("len", "int", "min", "max"):
            continue
        home = flow.home(node.value, scope)
        bound = flow.bindings(node.value, home)
        is_other = home is not flow.home(node.value, goal) or (
            scope is not goal and not isinstance(goal, cst.Module) and home is not script.module
        )
        is_late = any(binding.node in inside for binding in bound)
        if is_other or is_late or (scope is not goal and node.value in parameters(scope)):
            raise CannotDerive(
                f"the loop of line {script.line(loop)} goes over {script.code(call)}, and "
                f"{node.value} is not known where the run begins, or changes; make a DataLoader of "
                "what the batches are taken from"
            )
