"""The scaler is updated before it steps.

update() forgets which gradients were infinite, and the step that follows divides by a different
scale than they were multiplied by.

Fix: scaler.step(optimizer) first, then scaler.update().
Source: torch.amp.GradScaler documentation.
"""

from collections.abc import Iterator

from ..examples import scaled
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        roles = [event.role for event in turn.of(CallRole.UPDATE, CallRole.STEP)]
        scaled = [step for step in turn.of(CallRole.STEP) if step.is_scaled]
        updates = turn.of(CallRole.UPDATE)
        if len(updates) == 1 and scaled and roles[:1] == [CallRole.UPDATE]:
            yield Found(updates[0].call, f"{facts.code(updates[0].call)} before the step")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(scaled(step="scaler.update()", update="scaler.step(optimizer)"),),
    healthy=(scaled(),),
)  # fmt: skip
