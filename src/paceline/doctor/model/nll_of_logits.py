"""A negative log likelihood gets raw scores.

It expects log-probabilities and does not check them: with raw scores the loss falls without limit.

Fix: CrossEntropyLoss, or a LogSoftmax at the end of the model.
Source: torch.nn.NLLLoss documentation: "the input is expected to contain log-probabilities".
"""

import re
from collections.abc import Iterator

from ...porting.tree import positional
from ..ends import ending
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    if re.search(r"log_softmax|LogSoftmax|logsumexp|\.log\(|torch\.log\b", facts.uncommented):
        return
    for call in facts.script.every_call:
        if facts.loss_kind(call) not in ("NLLLoss", "nll_loss"):
            continue
        arguments = positional(call)
        last = ending(facts, arguments[0]) if arguments else None
        if last is not None and (last.kind == "Linear" or last.kind in ("softmax", "Softmax")):
            yield Found(call, f"{facts.code(call)} gets the output of {last.kind}")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(before="loss_fn = nn.NLLLoss()").replace("loss_fn = nn.CrossEntropyLoss()\n", ""),),
    healthy=(looped(),),
)  # fmt: skip
