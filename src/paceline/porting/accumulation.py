"""Rewrites Accelerate's gradient accumulation as a loop that accumulates by itself.

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
        name: what the script calls it.
        calls: the calls that make it; several in the branches of an ``if``.
        steps: the batches that a step accumulates, as an expression; None for one batch.
        precision: the precision that it asks for beside fp32; empty if none.
    """

    name: str
    calls: list[cst.Call]
    steps: cst.BaseExpression | None
    precision: str

    def steps_code(self, script: SourceTree) -> str:
        """Return the text of ``steps``; 1 if a step takes one batch."""
        return "1" if self.steps is None else script.code(self.steps)


def accumulate(
    script: SourceTree, training: Stepping, accelerator: Accelerator, edits: TreeEdits
) -> bool:
    """Rewrite ``with accumulate(model)`` as a step block; return whether there was one."""
    calls = script.calls(f"{accelerator.name}.accumulate")
    synced = [
        node
        for node in script.nodes
        if isinstance(node, cst.Attribute)
        and script.code(node) == f"{accelerator.name}.sync_gradients"
    ]
    if len(calls) > 1 or (synced and not calls):
        raise CannotDerive
    if accelerator.steps is not None:
        _divide_loss(script, accelerator, edits)  # as Accelerate's backward does in any case
    for call in calls:
        edits.replace(call, f"{accelerator.name}.step()")
        due = "True"
        if accelerator.steps is not None:
            due = _due_condition(script, training, accelerator, edits)
            _wrap_step(script, training, accelerator, due, edits)
        for node in synced:
            edits.replace(node, due)
    return bool(calls)


def _divide_loss(script: SourceTree, accelerator: Accelerator, edits: TreeEdits) -> None:
    """Divide the loss by the number of batches."""
    assert accelerator.steps is not None
    for call in script.calls(f"{accelerator.name}.backward"):
        for loss in positional(call)[:1]:
            edits.replace(
                loss, f"{_in_brackets(script, loss)} / {_in_brackets(script, accelerator.steps)}"
            )


def _due_condition(
    script: SourceTree, training: Stepping, accelerator: Accelerator, edits: TreeEdits
) -> str:
    """Return the condition for a step: every k-th batch, and the last one."""
    assert accelerator.steps is not None
    assert training.loop.loader is not None
    loop, share = training.loop.node, script.code(accelerator.steps)
    scope, home = script.scope(loop), script.scope(accelerator.calls[0])
    if not isinstance(accelerator.steps, cst.BaseNumber) and scope is not home:
        raise CannotDerive(
            f"line {script.line(accelerator.calls[0])}: gradient_accumulation_steps={share} is not "
            f"known in the function of the loop of line {script.line(loop)}; make it a name of "
            "the file"
        )
    if not isinstance(loop, cst.For):
        raise CannotDerive(
            f"the loop of line {script.line(loop)} takes its batches by hand under "
            f"{accelerator.name}.accumulate; write for batch in {script.code(training.loop.loader)}"
        )
    loader, target = script.code(training.loop.loader), loop.target
    over = loop.iter
    is_enumerated = isinstance(over, cst.Call) and script.code(over.func) == "enumerate"
    if is_enumerated and isinstance(target, cst.Tuple) and len(over.args) == 1:  # type: ignore[attr-defined]  # is_enumerated: a call; start=1 would count from 1
        number = script.code(target.elements[0].value)
    else:
        number, targets = "index", script.code(target)
        targets = f"({targets})" if isinstance(target, cst.Tuple) and not target.lpar else targets
        edits.replace(target, f"{number}, {targets}")
        edits.replace(loop.iter, f"enumerate({script.code(loop.iter)})")
    share = (
        share
        if isinstance(accelerator.steps, cst.BaseNumber | cst.Name | cst.Attribute)
        else f"({share})"
    )
    return f"({number} + 1) % {share} == 0 or {number} + 1 == len({loader})"


def _wrap_step(
    script: SourceTree, training: Stepping, accelerator: Accelerator, due: str, edits: TreeEdits
) -> None:
    """Let the optimizer, and prepared schedulers, step only when due; others always step."""
    assert accelerator.steps is not None
    share, order = script.code(accelerator.steps), script.order
    backwards = script.calls(f"{accelerator.name}.backward")
    inside = set(script.within(training.loop.node))
    prepared = [
        argument
        for call in script.calls(f"{accelerator.name}.prepare")
        for argument in positional(call)
    ]
    names = {*training.optimizers, *({*training.schedulers()} & {*map(script.code, prepared)})}
    rows: list[cst.CSTNode] = []
    for call in script.calls("step", "zero_grad"):
        owner = script.code(call.func.value) if isinstance(call.func, cst.Attribute) else ""
        if call in inside and owner in names:
            if backwards and order[call] < order[backwards[0]]:
                raise CannotDerive(
                    f"line {script.line(call)} zeroes the gradients before backward, which "
                    "discards the accumulated ones; zero them after the step"
                )
            rows.append(script.block_line(call))
    rows.sort(key=order.__getitem__)
    blocks = {script.parents[row] for row in rows}
    if not rows or len(blocks) != 1:
        raise CannotDerive
    (block,) = blocks
    assert isinstance(block, cst.IndentedBlock)
    places = [list(block.body).index(row) for row in rows]  # type: ignore[arg-type]  # lines of this block
    if places != list(range(places[0], places[0] + len(places))):
        raise CannotDerive(
            f"lines {script.line(rows[0])} to {script.line(rows[-1])}: write step, scheduler and "
            f"zero_grad one below the other, under if {due}: ({share} batches a step)"
        )
    edits.wrap(rows, f"if {due}:")


def _in_brackets(script: SourceTree, expression: cst.BaseExpression) -> str:
    code = script.code(expression)
    is_whole = isinstance(expression, cst.BaseNumber | cst.Name | cst.Attribute | cst.Call)
    return code if is_whole or expression.lpar else f"({code})"
