"""A step goes through the scaler, but the loss was never scaled.

The scaler divides the gradients by a scale that they never had: updates are tens of thousands of
times too small.

Fix: scaler.scale(loss).backward().
Source: torch.amp.GradScaler documentation.
"""

from collections.abc import Iterator

from ..examples import looped, scaled
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, Event, is_scaler, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        backward = turn.of(CallRole.BACKWARD)
        steps = [step for step in turn.of(CallRole.STEP) if step.is_scaled]
        has_scaler = any(is_scaler(facts, facts.owner(step.call)) for step in steps)
        if has_scaler and not any(_may_be_scaled(facts, event) for event in backward):
            yield Found(backward[0].call, f"{facts.code(backward[0].call)} without scaler.scale")


def _may_be_scaled(facts: Facts, backward: Event) -> bool:
    """Whether a loss may be scaled, by its name or by any value that is assigned to it."""
    values = [
        facts.code(binding.value)
        for binding in facts.script.bindings
        if binding.name == backward.subject
    ]
    return backward.is_scaled or any("scale" in code for code in (backward.subject, *values))


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(scaled(backward="loss.backward()"),),
    healthy=(
        scaled(), looped(), scaled(backward="loss = scaler.scale(loss)\nloss.backward()"),
        scaled(backward="if is_mixed:\n    loss = scaler.scale(loss)\nloss.backward()"),
    ),
)  # fmt: skip
