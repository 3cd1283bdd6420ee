"""``backward()`` runs under autocast.

Autograd runs each backward operation in the type that its forward chose; autocast around it only
adds casts, and may choose different types than the forward pass.

Fix: end the with block before backward().
Source: torch.amp documentation: "Backward passes under autocast are not recommended".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import looped, scaled
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal

_AUTOCAST = r"(^|\.)autocast$"


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.methods("backward"):
        is_cast = facts.is_in(call, _AUTOCAST) and not _is_off(facts, call)
        if is_cast and not facts.is_in(call, r"no_grad$"):
            yield Found(call, f"{facts.code(call)} runs under autocast")


def _is_off(facts: Facts, call: cst.Call) -> bool:
    """Whether the innermost autocast around a call has ``enabled=False``."""
    for context in facts.contexts(call):
        for origin in facts.flow.origins(context) or [context]:
            name = facts.meaning(origin)
            if isinstance(origin, cst.Call) and re.search(_AUTOCAST, name):
                position = 0 if ".amp.autocast" in name and name != "torch.amp.autocast" else 2
                return literal(facts.argument(origin, "enabled", position)) == "False"
    return False


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(scaled(inside="scaler.scale(loss).backward()", backward="pass"),),
    healthy=(
        scaled(), looped(),
        scaled(inside='with torch.autocast("cuda", enabled=False):\n        scaler.scale(loss).backward()', backward="pass"),
        scaled(inside="with torch.cuda.amp.autocast(False):\n        scaler.scale(loss).backward()", backward="pass"),
    ),
)  # fmt: skip
