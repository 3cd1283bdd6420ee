"""Gradients are set to zero between backward() and step().

The step sees no gradients: nothing is learned.

Fix: zero_grad() before backward(), or after step().
Source: torch.optim documentation, "Taking an optimization step".
"""

from collections.abc import Iterator

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        events = turn.events
        for index, zero in enumerate(events):
            if zero.role is not CallRole.ZERO:
                continue
            before = [
                event
                for event in events[:index]
                if event.role in (CallRole.BACKWARD, CallRole.STEP)
            ]
            after = [
                event
                for event in events[index:]
                if event.role in (CallRole.BACKWARD, CallRole.STEP)
            ]
            if not before or not after or before[-1].role is not CallRole.BACKWARD:
                continue
            is_same = after[0].subject == zero.subject or facts.is_model(facts.owner(zero.call))
            is_step = after[0].role is CallRole.STEP and is_same
            if is_step and before[-1].branches == zero.branches == after[0].branches:
                yield Found(zero.call, f"{facts.code(zero.call)} between backward() and step()")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([STEP[0], *STEP[2:4], STEP[1], STEP[4]]),),
    healthy=(looped(), looped([STEP[0], *STEP[2:], STEP[1]]),),
)  # fmt: skip
