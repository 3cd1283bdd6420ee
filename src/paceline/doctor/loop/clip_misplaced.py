"""Gradients are clipped where no step uses the result.

After the step the clipped gradients are discarded; before the backward pass there are none yet.
Either way the update uses unclipped gradients.

Fix: clip between backward() and step().
Source: torch.nn.utils.clip_grad_norm_ documentation: "gradients are modified in-place".
"""

from collections.abc import Iterator

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, turns
from ..rule import Found, ScriptRule

_ROLES = (CallRole.BACKWARD, CallRole.CLIP, CallRole.STEP)


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        events = [event for event in turn.events if event.role in _ROLES]
        if len({event.branches for event in events}) != 1 or len(events) != 3:
            continue
        roles = [event.role for event in events]
        clip = events[roles.index(CallRole.CLIP)] if CallRole.CLIP in roles else None
        if clip is None:
            continue
        if roles == [CallRole.BACKWARD, CallRole.STEP, CallRole.CLIP]:
            yield Found(clip.call, f"{facts.code(clip.call)} after the step")
        if roles == [CallRole.CLIP, CallRole.BACKWARD, CallRole.STEP]:
            yield Found(clip.call, f"{facts.code(clip.call)} before the backward pass")


_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped([*STEP, _CLIP]),
        looped([*STEP[:3], _CLIP, *STEP[3:]]),
        looped(["x, y = x.to(device), y.to(device)", "loss = loss_fn(model(x), y)", "loss.backward()", "optimizer.step()", _CLIP, "optimizer.zero_grad()"]),
    ),
    healthy=(
        looped([*STEP[:4], _CLIP, STEP[4]]),
        looped([*STEP[:4], _CLIP, STEP[4], _CLIP]),
        looped([*STEP, "for p in model.parameters():\n    p.data.clamp_(-0.01, 0.01)"]),
    ),
)  # fmt: skip
