"""The scheduler steps before the optimizer does.

The first value of the schedule is skipped, and torch warns.

Fix: scheduler.step() after optimizer.step().
Source: torch.optim documentation, "How to adjust learning rate": since 1.1 the order is optimizer first.
"""

from collections.abc import Iterator

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, events_of, loops_around, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        for loop in (turn.loop, *loops_around(facts, turn)):
            events = events_of(facts, loop)
            first = next(
                (event for event in events if event.role in (CallRole.STEP, CallRole.SCHEDULE)),
                None,
            )
            is_stepped = any(event.role is CallRole.STEP for event in events)
            if first is None or first.role is not CallRole.SCHEDULE or not is_stepped:
                continue
            if first.is_always and not first.call.args:
                yield Found(first.call, f"{facts.code(first.call)} before the optimizer's step")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)", epoch="scheduler.step()"),),
    healthy=(looped(before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)", after="scheduler.step()"),),
)  # fmt: skip
