"""Anomaly detection is on.

Each forward operation records a stack trace, and each backward operation checks its result for NaN.

Fix: leave it out once the fault is found.
Source: torch.autograd.detect_anomaly documentation: "for debugging only, as it slows down".
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name, positional
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..mends import remove_statement
from ..rule import Found, ScriptRule
from ..values import literal


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.calls("set_detect_anomaly", "detect_anomaly"):
        arguments = positional(call)
        is_on = not arguments or literal(arguments[0]) == "True"
        if facts.meaning(call).endswith("set_detect_anomaly") and not arguments:
            is_on = literal(by_name(call).get("mode")) == "True"
        if is_on and not any(isinstance(ancestor, cst.If) for ancestor in facts.script.up(call)):
            yield Found(call, f"{facts.code(call)} is on")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(before="torch.autograd.set_detect_anomaly(True)"),),
    healthy=(looped(before="torch.autograd.set_detect_anomaly(False)"),),
    mend=remove_statement,
)  # fmt: skip
