"""A tensor grows by ``torch.cat`` in each turn of a loop.

Each turn copies all that is there: n turns copy n*n/2 pieces.

Fix: append to a list, and torch.cat once after the loop.
Source: torch.cat documentation: it returns a new tensor.
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for one in facts.script.bindings:
        value = one.value
        if not isinstance(value, cst.Call) or facts.meaning(value) not in (
            "torch.cat",
            "torch.hstack",
            "torch.vstack",
        ):
            continue
        given = positional(value)
        parts = given[0].elements if given and isinstance(given[0], cst.List | cst.Tuple) else ()
        names = [facts.code(part.value) for part in parts]
        loop = next((up for up in facts.script.up(value) if isinstance(up, cst.For)), None)
        if loop is None or one.name not in names[:1] or _is_read(facts, one.name, loop, value):
            continue
        inside = set(facts.script.within(loop))
        anew = [
            each for each in facts.script.bindings if each.name == one.name and each.node in inside
        ]
        if len(anew) == 1:
            yield Found(
                value,
                f"{one.name} is copied as a whole in each turn of line {facts.script.line(loop)}",
            )


def _is_read(facts: Facts, name: str, loop: cst.For, value: cst.Call) -> bool:
    """Whether the loop uses it as it is so far, as text that is generated does."""
    own = set(facts.script.within(value))
    return any(
        isinstance(one, cst.Name | cst.Attribute)
        and facts.code(one) == name
        and one not in own
        and not isinstance(facts.script.parents[one], cst.AssignTarget)
        for one in facts.script.within(loop)
    )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "outs = torch.cat([outs, loss.detach().view(1)])"], before="outs = torch.empty(0)"),),
    healthy=(looped([*STEP, "outs.append(loss.detach())"], before="outs = []", end="torch.stack(outs)"),),
)  # fmt: skip
