"""A loss gets the predicted class instead of the scores.

argmax has no gradient: nothing can be learned through it.

Fix: pass the output of the model to the loss, and use argmax for the accuracy only.
Source: torch.nn.CrossEntropyLoss documentation: the input is the unnormalised score of each class.
"""

from collections.abc import Iterator

from ...porting.tree import positional
from ..ends import ending
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.every_call:
        if not facts.loss_kind(call) or not positional(call):
            continue
        last = ending(facts, positional(call)[0])
        if last is not None and last.kind == "argmax":
            yield Found(call, f"{facts.code(call)} gets the result of argmax")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP[:2], "out = model(x).argmax(dim=1)", "loss = loss_fn(out.float(), y)", *STEP[3:]]), looped([*STEP[:2], "loss = loss_fn(torch.argmax(model(x), 1), y)", *STEP[3:]]),),
    healthy=(looped(),),
)  # fmt: skip
