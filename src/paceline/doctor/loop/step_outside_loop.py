"""Each batch sets the gradients to zero, but the step comes after the loop over batches.

There is one step an epoch, with the gradients of the last batch only.

Fix: move step() into the loop over batches, after backward().
Source: torch.optim documentation, "Taking an optimization step".
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
        if not zero or {event.subject for event in zero} != {event.subject for event in step}:
            continue
        loops = {_loop(event) for event in (*zero, *backward)}
        is_inside = len(loops) == 1 and None not in loops
        if is_inside and not any(_loop(event) for event in step):
            yield Found(
                step[0].call,
                f"{facts.code(step[0].call)} once, after the loop that zeroes the gradients each iteration",
            )


def _loop(event: Event) -> cst.CSTNode | None:
    """Return the loop within the turn that an event is in, or None."""
    return next((node for node, _ in event.branches if isinstance(node, cst.For | cst.While)), None)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(STEP[:4], after="optimizer.step()"),),
    healthy=(
        looped(),
        looped([STEP[0], *STEP[2:4]], epoch="optimizer.zero_grad()", after="optimizer.step()"),
    ),
)  # fmt: skip
