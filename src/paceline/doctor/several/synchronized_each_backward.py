"""Accumulated gradients are averaged over the processes in each backward pass.

Under DistributedDataParallel every backward() sends all gradients; only the last one before a step
has to.

Fix: with model.no_sync(): around all but the last backward pass before a step.
Source: torch.nn.parallel.DistributedDataParallel.no_sync documentation.
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, Event, turns
from ..rule import Found, ScriptRule

_SYNCHRONIZES_OTHERWISE = (
    "no_sync",
    "require_backward_grad_sync",
    "Accelerator",
    "fully_shard",
    "FullyShardedDataParallel",
)


def check(facts: Facts) -> Iterator[Found]:
    wrapped = facts.script.calls("DistributedDataParallel")
    if not wrapped or any(name in facts.uncommented for name in _SYNCHRONIZES_OTHERWISE):
        return
    for turn in turns(facts):
        backward, step = turn.of(CallRole.BACKWARD), turn.of(CallRole.STEP)
        is_every = len(backward) == 1 and backward[0].is_always
        if is_every and all(_is_counted(event) for event in step):
            yield Found(
                backward[0].call,
                f"{facts.code(backward[0].call)} sends gradients in every iteration, but the step of line "
                f"{facts.script.line(step[0].call)} is not in every iteration",
            )


def _is_counted(step: Event) -> bool:
    """Whether a step is in a branch that is taken every few turns: ``if i % 4 == 0``."""
    return any(
        isinstance(node, cst.If) and below is node.body
        and any(isinstance(part.operator, cst.Modulo) for part in _operations(node.test))
        for node, below in step.branches
    )  # fmt: skip


def _operations(node: cst.CSTNode) -> Iterator[cst.BinaryOperation]:
    if isinstance(node, cst.BinaryOperation):
        yield node
    for child in node.children:
        yield from _operations(child)


_DDP = (
    "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(model)"
)
_LATER = "if (i + 1) % 4 == 0:\n    optimizer.step()\n    optimizer.zero_grad()"
_TURN = [STEP[0], "loss = loss_fn(model(x), y) / 4", STEP[3], _LATER]
RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(_TURN, before=_DDP),),
    healthy=(
        looped(_TURN), looped(before=_DDP),
        looped([STEP[0], "with model.no_sync() if i % 4 else nullcontext():\n    loss = loss_fn(model(x), y) / 4\n    loss.backward()", _LATER], before=_DDP),
        looped([*STEP[:4], "if torch.isfinite(loss):\n    optimizer.step()"], before=_DDP),
    ),
)  # fmt: skip
