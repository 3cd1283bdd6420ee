"""The output of a softmax is passed to a cross entropy, which applies one itself.

With scores between 0 and 1 no prediction can become certain: the loss has a floor, and its
gradients are small.

Fix: pass the raw scores (logits) to the loss, and apply the softmax where probabilities are shown.
Source: torch.nn.CrossEntropyLoss documentation: "the input is expected to contain the unnormalized logits".
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
        if facts.loss_kind(call) not in ("CrossEntropyLoss", "cross_entropy"):
            continue
        arguments = positional(call)
        last = ending(facts, arguments[0]) if arguments else None
        if last is not None and last.kind in ("softmax", "Softmax"):
            line = facts.script.line(last.node)
            yield Found(call, f"{facts.code(call)} gets the softmax of line {line}")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP[:2], "out = torch.softmax(model(x), dim=1)", "loss = loss_fn(out, y)", *STEP[3:]]),),
    healthy=(looped(),),
)  # fmt: skip
