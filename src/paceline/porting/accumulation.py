"""Gradient accumulation as Accelerate has it, written as a loop does it by itself.

    with accelerator.accumulate(model):      with accelerator.step():
        accelerator.backward(loss)       ->      accelerator.backward(loss / k)
        optimizer.step()                         if (i + 1) % k == 0 or i + 1 == len(loader):
                                                     optimizer.step()

This module must not know what else an accelerator does.
"""

from typing import NamedTuple

import libcst as cst

from .loops import Stepping
from .tree import CannotDerive, SourceTree, TreeEdits, positional


class Accelerator(NamedTuple):
    """The accelerator of a script.

    Attributes:
        name: what it is called.
        made: where; several: in the branches of an ``if``.
        steps: batches that a step accumulates, as an expression; None: one.
        precision: what it asks for beside fp32; empty: nothing.
    """

    name: str
    made: list[cst.Call]
    steps: cst.BaseExpression | None
    precision: str


def accumulate(script: SourceTree, training: Stepping, own: Accelerator, edits: TreeEdits) -> bool:
    """``with accumulate(model)`` as a step block; whether there is one."""
    calls = script.calls(f"{own.name}.accumulate")
    synced = [
        one
        for one in script.nodes
        if isinstance(one, cst.Attribute) and script.code(one) == f"{own.name}.sync_gradients"
    ]
    if len(calls) > 1 or (synced and not calls):
        raise CannotDerive
    if own.steps is not None:
        _divide(script, own, edits)  # as Accelerate's backward does in any case
    for call in calls:
        edits.replace(call, f"{own.name}.step()")
        due = "True"
        if own.steps is not None:
            due = _due(script, training, own, edits)
            _share(script, training, own, due, edits)
        for one in synced:
            edits.replace(one, due)
    return bool(calls)


def _divide(script: SourceTree, own: Accelerator, edits: TreeEdits) -> None:
    """The loss by the number of batches."""
    assert own.steps is not None
    for call in script.calls(f"{own.name}.backward"):
        for loss in positional(call)[:1]:
            edits.replace(loss, f"{_in_brackets(script, loss)} / {_in_brackets(script, own.steps)}")


def _due(script: SourceTree, training: Stepping, own: Accelerator, edits: TreeEdits) -> str:
    """The condition for a step: every k-th batch, and the last one."""
    assert own.steps is not None
    assert training.loop.loader is not None
    loop, share = training.loop.node, script.code(own.steps)
    scope, home = script.scope(loop), script.scope(own.made[0])
    if not isinstance(own.steps, cst.BaseNumber) and scope is not home:
        raise CannotDerive(
            f"line {script.line(own.made[0])}: gradient_accumulation_steps={share} is not known in "
            f"the function of the loop of line {script.line(loop)}; make it a name of the file"
        )
    if not isinstance(loop, cst.For):
        raise CannotDerive(
            f"the loop of line {script.line(loop)} takes its batches by hand under "
            f"{own.name}.accumulate; write for batch in {script.code(training.loop.loader)}"
        )
    loader, target = script.code(training.loop.loader), loop.target
    over = loop.iter
    is_counted = isinstance(over, cst.Call) and script.code(over.func) == "enumerate"
    if is_counted and isinstance(target, cst.Tuple) and len(positional(over)) == 1:  # type: ignore[arg-type]  # is_counted: a call
        number = script.code(target.elements[0].value)
    else:
        number, told = "index", script.code(target)
        told = f"({told})" if isinstance(target, cst.Tuple) and not target.lpar else told
        edits.replace(target, f"{number}, {told}")
        edits.replace(loop.iter, f"enumerate({script.code(loop.iter)})")
    share = (
        share if isinstance(own.steps, cst.BaseNumber | cst.Name | cst.Attribute) else f"({share})"
    )
    return f"({number} + 1) % {share} == 0 or {number} + 1 == len({loader})"


def _share(
    script: SourceTree, training: Stepping, own: Accelerator, due: str, edits: TreeEdits
) -> None:
    """Only every so many batches step, with schedulers that were prepared; others always do."""
    assert own.steps is not None
    share, order = script.code(own.steps), script.order
    backs = script.calls(f"{own.name}.backward")
    inside = set(script.within(training.loop.node))
    prepared = [one for call in script.calls(f"{own.name}.prepare") for one in positional(call)]
    names = {*training.optimizers, *({*training.schedulers()} & {*map(script.code, prepared)})}
    rows: list[cst.CSTNode] = []
    for call in script.calls("step", "zero_grad"):
        owner = script.code(call.func.value) if isinstance(call.func, cst.Attribute) else ""
        if call in inside and owner in names:
            if backs and order[call] < order[backs[0]]:
                raise CannotDerive(
                    f"line {script.line(call)} zeroes before backward, which takes away what was "
                    "accumulated; zero after the step"
                )
            rows.append(script.block_line(call))
    rows.sort(key=order.__getitem__)
    blocks = {script.parents[one] for one in rows}
    if not rows or len(blocks) != 1:
        raise CannotDerive
    (block,) = blocks
    assert isinstance(block, cst.IndentedBlock)
    places = [list(block.body).index(one) for one in rows]  # type: ignore[arg-type]  # lines of this block
    if places != list(range(places[0], places[0] + len(places))):
        raise CannotDerive(
            f"lines {script.line(rows[0])} to {script.line(rows[-1])}: write step, scheduler and "
            f"zero_grad one below the other, under if {due}: ({share} batches a step)"
        )
    edits.wrap(rows, f"if {due}:")


def _in_brackets(script: SourceTree, one: cst.BaseExpression) -> str:
    code = script.code(one)
    is_whole = isinstance(one, cst.BaseNumber | cst.Name | cst.Attribute | cst.Call)
    return code if is_whole or one.lpar else f"({code})"
