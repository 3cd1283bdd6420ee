"""The scaler is never updated.

Its scale never changes, and after a step that was skipped for infinite gradients all later steps
are skipped, too; a second scaler.step() before update() is refused.

Fix: scaler.update() once after the steps of each iteration.
Source: torch.amp.GradScaler documentation.
"""

from collections.abc import Iterator

from ..examples import scaled
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, is_scaler, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    if next(facts.methods("update"), None) is not None:
        return
    for turn in turns(facts):
        for step in turn.of(CallRole.STEP):
            if step.is_scaled and is_scaler(facts, facts.owner(step.call)):
                yield Found(step.call, f"no {facts.code(facts.owner(step.call))}.update() follows")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(scaled(update=""),),
    healthy=(scaled(),),
)  # fmt: skip
