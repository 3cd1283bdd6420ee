"""The loss is scaled, but the optimizer steps without the scaler.

The step uses gradients that are about 65536 times too large.

Fix: scaler.step(optimizer), then scaler.update().
Source: torch.amp.GradScaler documentation.
"""

from collections.abc import Iterator

from ..examples import looped, scaled
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        is_scaled = any(backward.is_scaled for backward in turn.of(CallRole.BACKWARD))
        steps = turn.of(CallRole.STEP)
        is_unscaled = bool(turn.of(CallRole.UNSCALE))
        if is_scaled and not is_unscaled and not any(step.is_scaled for step in steps):
            yield Found(steps[0].call, f"{facts.code(steps[0].call)} after a scaled loss")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        scaled(step="optimizer.step()"),
        scaled(backward="loss = scaler.scale(loss)\nloss.backward()", step="optimizer.step()"),
    ),
    healthy=(scaled(), looped(),),
)  # fmt: skip
