"""The output of a sigmoid is passed to a loss that applies one itself.

The loss sees only numbers between 0.5 and 0.73 and never becomes small.

Fix: leave the sigmoid out.
Source: torch.nn.BCEWithLogitsLoss documentation: it combines a Sigmoid layer and the BCELoss.
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
        kind = facts.loss_kind(call)
        if kind not in ("BCEWithLogitsLoss", "binary_cross_entropy_with_logits"):
            continue
        arguments = positional(call)
        last = ending(facts, arguments[0]) if arguments else None
        if last is not None and last.kind in ("sigmoid", "Sigmoid"):
            line = facts.script.line(last.node)
            yield Found(call, f"{facts.code(call)} gets the sigmoid of line {line}")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP[:2], "out = torch.sigmoid(model(x))", "loss = F.binary_cross_entropy_with_logits(out, y)", *STEP[3:]]),),
    healthy=(looped([*STEP[:2], "loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)", *STEP[3:]]),),
)  # fmt: skip
