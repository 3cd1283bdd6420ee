"""A Kullback-Leibler divergence gets probabilities as its first argument.

It expects log-probabilities: the result is not a divergence and may be negative.

Fix: F.log_softmax(...) for the first argument.
Source: torch.nn.KLDivLoss documentation: "this loss expects the argument input in the log-space".
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
        if facts.loss_kind(call) not in ("KLDivLoss", "kl_div"):
            continue
        arguments = positional(call)
        last = ending(facts, arguments[0]) if arguments else None
        if last is not None and last.kind in ("softmax", "Softmax"):
            yield Found(call, f"{facts.code(call)} gets a softmax, not its logarithm")


_KL = [
    *STEP[:2],
    "loss = F.kl_div({}(model(x), dim=1), F.softmax(y, dim=1), reduction='batchmean')",
    *STEP[3:],
]
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([line.format("F.softmax") for line in _KL]),),
    healthy=(
        looped([line.format("F.log_softmax") for line in _KL]),
        looped([line.format("F.softmax").replace("kl_div(", "kl_div(torch.log(").replace("dim=1), F", "dim=1)), F") for line in _KL]),
    ),
)  # fmt: skip
