"""Gradients are computed, but no optimizer ever steps.

The parameters never change.

Fix: optimizer.step() after backward().
Source: torch.optim documentation, "Taking an optimization step".
"""

import re
from collections.abc import Iterator

from ...porting.tree import positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_OPTIMIZERS = re.compile(r"^torch\.optim\.[A-Z]")
_OTHER_STEPS = re.compile(
    r"\.\w*step|Trainer|_step\(|LightningModule|[Aa]ccelerat|deepspeed|\.optimize\(|functional_call"
)


def check(facts: Facts) -> Iterator[Found]:
    optimizers = [
        call for call in facts.script.every_call if _OPTIMIZERS.search(facts.meaning(call))
    ]
    if not optimizers or _OTHER_STEPS.search(facts.uncommented):
        return
    names = [binding.name for binding in facts.script.bindings if binding.value in optimizers]
    arguments = {
        facts.code(argument) for call in facts.script.every_call for argument in positional(call)
    }  # fmt: skip
    for call in facts.methods("backward"):
        if any(facts.flow.around(call)) and not arguments & set(names):
            yield Found(
                call, f"{facts.code(call)}, but no {names[0] if names else 'optimizer'}.step()"
            )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(STEP[:4]),),
    healthy=(looped(),),
)  # fmt: skip
