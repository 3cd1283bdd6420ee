"""``backward()`` runs under autocast.

Autograd runs each backward operation in the type that its forward chose; autocast around it only
adds casts, and may choose other types than the forward did.

Fix: end the with block before backward().
Source: torch.amp documentation: "Backward passes under autocast are not recommended".
"""

from collections.abc import Iterator

from ..examples import looped, scaled
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.methods("backward"):
        if facts.is_in(call, r"(^|\.)autocast$") and not facts.is_in(call, r"no_grad$"):
            yield Found(call, f"{facts.code(call)} runs under autocast")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(scaled(inside="scaler.scale(loss).backward()", backward="pass"),),
    healthy=(scaled(), looped(),),
)  # fmt: skip
