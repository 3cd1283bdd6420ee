"""The weights themselves are float16, and are trained.

An update below a thousandth of a weight is lost to rounding, and Adam's eps of 1e-8 is 0.

Fix: keep the weights in float32 and use torch.autocast.
Source: Micikevicius and others, Mixed Precision Training, ICLR 2018, section 3.1.
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    if not turns(facts):
        return
    trained = {
        one for _, optimizer in facts.steps.steps for one in facts.steps.models(optimizer)
    }  # fmt: skip
    for call in facts.methods("half"):
        owner = facts.owner(call)
        statement = facts.script.statement(call)
        kept = facts.code(statement.targets[0].target) if isinstance(statement, cst.Assign) else ""
        if facts.is_model(owner) and trained & {facts.code(owner), kept}:
            yield Found(call, f"{facts.code(call)}: its parameters are trained in float16")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(before="model.half()"),),
    healthy=(looped(), looped(end="model.eval()\nexported = model.cpu()"),),
)  # fmt: skip
