"""Gradients are set to zero every iteration, but the step comes only every few iterations.

Only the last of the accumulated batches counts.

Fix: call zero_grad() beside step(), in the same branch.
Source: PyTorch, Automatic Mixed Precision examples, "Gradient accumulation".
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, Event, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        zero, backward, step = (
            turn.of(role) for role in (CallRole.ZERO, CallRole.BACKWARD, CallRole.STEP)
        )
        if len(zero) != 1 or len(backward) != 1 or len({event.subject for event in step}) != 1:
            continue
        if not zero[0].is_always or not backward[0].is_always or zero[0].subject != step[0].subject:
            continue
        if all(_is_counted(facts, event) for event in step):
            yield Found(
                zero[0].call,
                f"{facts.code(zero[0].call)} in every iteration, but the step of line "
                f"{facts.script.line(step[0].call)} is not",
            )


def _is_counted(facts: Facts, step: Event) -> bool:
    """Whether a step is in a branch that is taken every few turns: ``if i % 4 == 0``."""
    return any(
        isinstance(node, cst.If)
        and below is node.body
        and any(isinstance(part, cst.Modulo) for part in facts.script.within(node.test))
        for node, below in step.branches
    )


_LATER = "if (i + 1) % 4 == 0:\n    optimizer.step()"
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP[:2], "loss = loss_fn(model(x), y) / 4", STEP[3], _LATER]),),
    healthy=(
        looped([STEP[0], "loss = loss_fn(model(x), y) / 4", STEP[3], f"{_LATER}\n    optimizer.zero_grad()"]),
        looped([STEP[0], "if i % 4 == 0:\n    optimizer.zero_grad()", "loss = loss_fn(model(x), y) / 4", STEP[3], _LATER]),
        looped([*STEP[:4], "if torch.isfinite(loss):\n    optimizer.step()"]),
        looped(),
    ),
)  # fmt: skip
