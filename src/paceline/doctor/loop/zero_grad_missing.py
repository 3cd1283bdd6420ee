"""Gradients are never set to zero.

backward() adds to what is there, so each step uses the sum over all batches so far.

Fix: optimizer.zero_grad() once a step, before backward().
Source: torch.optim documentation, "Taking an optimization step".
"""

import re
from collections.abc import Iterator

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, turns
from ..rule import Found, ScriptRule

_ZEROES = re.compile(
    r"zero_grad|\.grad\s*=\s*None|grad\.zero_|set_to_none|\.grad\.data\.zero_|grad\.fill_"
)


def check(facts: Facts) -> Iterator[Found]:
    if _ZEROES.search(facts.text):
        return
    for turn in turns(facts):
        step = turn.of(CallRole.STEP)[0]
        made = facts.flow.origins(facts.owner(step.call))
        if step.is_scaled or any("torch.optim" in facts.meaning(one) for one in made):
            yield Found(step.call, f"{facts.code(step.call)}, and no zero_grad() anywhere")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([one for one in STEP if "zero_grad" not in one]),),
    healthy=(looped(), looped([one.replace("optimizer.zero_grad()", "model.zero_grad()") for one in STEP]),),
)  # fmt: skip
