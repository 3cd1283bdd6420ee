"""The optimizer is made anew in a loop that trains one model.

Its momentum and its moments begin at zero each time.

Fix: make it once, before the loop.
Source: torch.optim documentation, "Constructing it": an optimizer holds the current state.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    order = facts.script.order
    for _, optimizer in facts.steps.steps:
        for made in facts.flow.origins(optimizer):
            if not isinstance(made, cst.Call) or "optim." not in facts.meaning(made):
                continue
            loops = [one for one in facts.script.up(made) if isinstance(one, cst.For | cst.While)]
            is_guarded = any(isinstance(one, cst.If) for one in facts.script.up(made))
            for loop in loops[:1]:
                inside = set(facts.script.within(loop))
                models = facts.steps.models(optimizer)
                anew = [
                    one
                    for one in facts.script.bindings
                    if one.node in inside and one.name in models
                ]
                is_stepped = any(
                    call in inside and order[call] > order[made] for call, _ in facts.steps.steps
                )
                if (
                    models
                    and not anew
                    and is_stepped
                    and not is_guarded
                    and _is_counted(facts, loop)
                ):
                    yield Found(made, f"{facts.code(optimizer)} is made anew in each turn of line "
                                      f"{facts.script.line(loop)}")  # fmt: skip


def _is_counted(facts: Facts, loop: cst.For | cst.While) -> bool:
    """Over epochs or batches; what goes over settings or folds trains something else each time."""
    if not isinstance(loop, cst.For):
        return False
    return bool(re.search(r"epoch|range\(|loader", facts.code(loop.iter))) or bool(
        facts.loaders_of_loop(loop)
    )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(epoch="optimizer = torch.optim.Adam(model.parameters())"),),
    healthy=(looped(),),
)  # fmt: skip
