"""Gradients are clipped while they are still scaled.

They are about 65536 times too large, so every norm is above the limit: each update is clipped to
almost nothing, or to a length that changes with the scale.

Fix: scaler.unscale_(optimizer) before it.
Source: PyTorch, Automatic Mixed Precision examples, "Gradient clipping".
"""

from collections.abc import Iterator

from ..examples import scaled
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, Event, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        roles = [event.role for event in turn.events]
        is_scaled = any(event.is_scaled for event in turn.of(CallRole.BACKWARD))
        for index, event in enumerate(turn.events):
            is_clip = event.role is CallRole.CLIP and CallRole.UNSCALE not in roles[:index]
            if is_scaled and is_clip and _steps_scaled(turn.events[index:]):
                yield Found(event.call, "clipping sees gradients that are still scaled")


def _steps_scaled(events: tuple[Event, ...]) -> bool:
    return any(event.role is CallRole.STEP and event.is_scaled for event in events)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        scaled(clip="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
        scaled(backward="loss = scaler.scale(loss)\nloss.backward()", clip="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
    ),
    healthy=(scaled(clip="scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),),
)  # fmt: skip
