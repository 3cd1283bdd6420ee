"""The optimizer is created again in a loop that trains one model.

Its momentum and moments start at zero each time.

Fix: create it once, before the loop.
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
"""Methods of a model, and functions that take one, which set its weights again."""


def check(facts: Facts) -> Iterator[Found]:
    for _, optimizer in facts.steps.steps:
        for constructor in facts.flow.origins(optimizer):
            if not isinstance(constructor, cst.Call) or "optim." not in facts.meaning(constructor):
                continue
            ancestors = list(facts.script.up(constructor))
            loop = next((node for node in ancestors if isinstance(node, AnyLoop)), None)
            is_guarded = any(isinstance(node, cst.If) for node in ancestors)
            if loop is None or is_guarded or not _is_counted(facts, loop):
                continue
            models = facts.steps.models(optimizer)
            if models and _goes_on(facts, loop, constructor, models):
                yield Found(constructor, f"{facts.code(optimizer)} is created again in each iteration of line "
                                         f"{facts.script.line(loop)}")  # fmt: skip


def _goes_on(facts: Facts, loop: AnyLoop, constructor: cst.Call, models: Collection[str]) -> bool:
    """Whether each turn steps a model that earlier turns have trained."""
    order, nodes = facts.script.order, set(facts.script.within(loop))
    steps = [
        order[call] for call, _ in facts.steps.steps
        if call in nodes and order[call] > order[constructor]
    ]  # fmt: skip
    is_made_anew = any(
        binding.node in nodes and binding.name in models for binding in facts.script.bindings
    )
    is_reset = any(
        order[node] < min(steps, default=0) and _resets(facts, node, models)
        for node in nodes if isinstance(node, cst.Call)
    )  # fmt: skip
    return bool(steps) and not is_made_anew and not is_reset


def _resets(facts: Facts, call: cst.Call, models: Collection[str]) -> bool:
    """Whether a call sets a model's weights again: load_state_dict(), init_weights(model) ..."""
    name = facts.meaning(call).rpartition(".")[2]
    owner = facts.code(facts.owner(call)) if facts.method(call) else ""
    is_method = any(f"{owner}.".startswith(f"{model}.") for model in models)
    is_argument = any(facts.code(argument) in models for argument in positional(call))
    is_reset = _RESETS.search(name) is not None and (is_method or is_argument)
    return is_reset or name == "reset_parameters"


def _is_counted(facts: Facts, loop: AnyLoop) -> bool:
    """Whether a loop is over epochs or batches; one over settings or folds starts a new training each time."""
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
