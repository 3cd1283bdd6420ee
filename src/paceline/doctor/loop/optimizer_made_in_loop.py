"""The optimizer is made anew in a loop that trains one model.

Its momentum and its moments begin at zero each time.

Fix: make it once, before the loop.
Source: torch.optim documentation, "Constructing it": an optimizer holds the current state.
"""

import re
from collections.abc import Collection, Iterator

import libcst as cst

from ...porting.dataflow import AnyLoop
from ...porting.tree import positional
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_RESETS = re.compile(r"^apply$|^load_state_dict$|(^|_)re_?(set|init)|(^|_)init(_|ial|$)")
"""Methods of a model, and functions that are given one, after which it is another."""


def check(facts: Facts) -> Iterator[Found]:
    for _, optimizer in facts.steps.steps:
        for made in facts.flow.origins(optimizer):
            if not isinstance(made, cst.Call) or "optim." not in facts.meaning(made):
                continue
            around = list(facts.script.up(made))
            loop = next((one for one in around if isinstance(one, AnyLoop)), None)
            is_guarded = any(isinstance(one, cst.If) for one in around)
            if loop is None or is_guarded or not _is_counted(facts, loop):
                continue
            models = facts.steps.models(optimizer)
            if models and _goes_on(facts, loop, made, models):
                yield Found(made, f"{facts.code(optimizer)} is made anew in each turn of line "
                                  f"{facts.script.line(loop)}")  # fmt: skip


def _goes_on(facts: Facts, loop: AnyLoop, made: cst.Call, models: Collection[str]) -> bool:
    """Whether what is stepped in a turn is a model that an earlier turn has trained."""
    order, inside = facts.script.order, set(facts.script.within(loop))
    steps = [
        order[call] for call, _ in facts.steps.steps
        if call in inside and order[call] > order[made]
    ]  # fmt: skip
    is_made_anew = any(one.node in inside and one.name in models for one in facts.script.bindings)
    is_reset = any(
        order[one] < min(steps, default=0) and _resets(facts, one, models)
        for one in inside if isinstance(one, cst.Call)
    )  # fmt: skip
    return bool(steps) and not is_made_anew and not is_reset


def _resets(facts: Facts, call: cst.Call, models: Collection[str]) -> bool:
    """``model.load_state_dict(first)``, ``init_weights(model)``, of each layer reset_parameters."""
    name = facts.meaning(call).rpartition(".")[2]
    owner = facts.code(facts.owner(call)) if facts.method(call) else ""
    is_of_model = any(f"{owner}.".startswith(f"{one}.") for one in models)
    is_given = any(facts.code(one) in models for one in positional(call))
    is_reset = _RESETS.search(name) is not None and (is_of_model or is_given)
    return is_reset or name == "reset_parameters"


def _is_counted(facts: Facts, loop: AnyLoop) -> bool:
    """Over epochs or batches; what goes over settings or folds trains something else each time."""
    if not isinstance(loop, cst.For):
        return False
    return bool(re.search(r"epoch|range\(|loader", facts.code(loop.iter))) or bool(
        facts.loaders_of_loop(loop)
    )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(epoch="optimizer = torch.optim.Adam(model.parameters())"),
        looped(epoch="metric.reset()\noptimizer = torch.optim.Adam(model.parameters())"),
        looped(epoch="optimizer = torch.optim.Adam(model.parameters())", after="model.load_state_dict(last)"),
    ),
    healthy=(
        looped(), *(
            looped(epoch=f"{reset}\noptimizer = torch.optim.Adam(model.parameters())")
            for reset in (
                "model.reset_parameters()", "model.load_state_dict(first)", "model.apply(fresh)",
                "init_weights(model)", "reset(model)", "model[0].reset_parameters()",
                "for layer in model.children():\n    layer.reset_parameters()",
            )
        ),
        looped(epoch="optimizer = torch.optim.Adam(model.parameters())\nmodel.load_state_dict(first)"),
    ),
)  # fmt: skip
