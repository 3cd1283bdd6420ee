"""There is a ReLU between the last layer and a loss on logits.

The logits are then never below 0: no class can become unlikely, a binary output is never below 0.5,
and where the ReLU is 0 there is no gradient.

Fix: leave the last ReLU out.
Source: torch.nn.CrossEntropyLoss documentation: "the input is expected to contain the unnormalized logits".
"""

from collections.abc import Iterator

from ...porting.tree import positional
from ..ends import ending
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_LOSSES = ("CrossEntropyLoss", "cross_entropy", "BCEWithLogitsLoss",
           "binary_cross_entropy_with_logits")  # fmt: skip
_RELUS = ("ReLU", "relu", "ReLU6", "relu6", "relu_")


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.every_call:
        if facts.loss_kind(call) not in _LOSSES:
            continue
        arguments = positional(call)
        last = ending(facts, arguments[0]) if arguments else None
        if last is not None and last.kind in _RELUS:
            line = facts.script.line(last.node)
            yield Found(
                call, f"{facts.code(call)} gets the output of the {last.kind} of line {line}"
            )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped([*STEP[:2], "loss = loss_fn(F.relu(model(x)), y)", *STEP[3:]]),
        looped().replace("nn.Linear(64, 8)\n", "nn.Linear(64, 8), nn.ReLU()\n"),
    ),
    healthy=(looped(), looped([*STEP[:2], "loss = loss_fn(model(F.relu(x)), y)", *STEP[3:]])),
)  # fmt: skip
