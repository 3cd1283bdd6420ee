"""A binary cross entropy gets raw scores.

It takes logarithms of probabilities: values outside 0 to 1 are refused.

Fix: BCEWithLogitsLoss, or a sigmoid at the end of the model.
Source: torch.nn.BCELoss documentation: "all elements of input should be between 0 and 1".
"""

from collections.abc import Iterator

from ...porting.tree import positional
from ..ends import ending
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_RAW = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ReLU", "relu", "LeakyReLU", "tanh", "Tanh")


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.every_call:
        if facts.loss_kind(call) not in ("BCELoss", "binary_cross_entropy"):
            continue
        arguments = positional(call)
        last = ending(facts, arguments[0]) if arguments else None
        if last is not None and last.kind in _RAW:
            yield Found(call, f"{facts.code(call)} gets the output of {last.kind}")


_BINARY = [*STEP[:2], "loss = F.binary_cross_entropy({}, y)", *STEP[3:]]
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([line.format("model(x)") for line in _BINARY]),),
    healthy=(
        looped([line.format("torch.sigmoid(model(x))") for line in _BINARY]),
        looped([line.format("model(x).sigmoid()") for line in _BINARY]),
        looped([line.format("model(x)") for line in _BINARY]).replace("nn.Linear(64, 8)\n", "nn.Linear(64, 8), nn.Sigmoid()\n"),
        looped([line.format("model(x)").replace("cross_entropy", "cross_entropy_with_logits") for line in _BINARY]),
    ),
)  # fmt: skip
