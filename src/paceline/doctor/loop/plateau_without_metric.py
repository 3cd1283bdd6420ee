"""``ReduceLROnPlateau`` steps without a metric.

This raises a TypeError: the scheduler has nothing to watch.

Fix: scheduler.step(validation_loss).
Source: torch.optim.lr_scheduler.ReduceLROnPlateau documentation.
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.methods("step"):
        schedules = [
            origin
            for origin in facts.flow.origins(facts.owner(call))
            if isinstance(origin, cst.Call)
        ]
        is_plateau = bool(schedules) and all(
            facts.meaning(schedule).endswith("lr_scheduler.ReduceLROnPlateau")
            for schedule in schedules
        )
        if is_plateau and not call.args:
            yield Found(call, f"{facts.code(call)} of a ReduceLROnPlateau without a metric")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(before="scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)", after="scheduler.step()"),),
    healthy=(looped(before="scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)", after="scheduler.step(loss.item())"),),
)  # fmt: skip
