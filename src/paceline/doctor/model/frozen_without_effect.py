"""Layers should be frozen, but are not.

``requires_grad`` of a module is an ordinary attribute, and a misspelled one of a parameter is a new
attribute: nothing is frozen, and there is no warning.

Fix: module.requires_grad_(False), or p.requires_grad = False for each of its parameters.
Source: torch.nn.Module.requires_grad_ documentation.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_MISSPELLED = re.compile(
    r"^(require_grad|require_grads|requires_grads|required_grad|requires_gradient|require_gradient|"
    r"requires_gard|requiresgrad)$"
)


def check(facts: Facts) -> Iterator[Found]:
    for binding in facts.script.bindings:
        target = binding.node.targets[0].target if isinstance(binding.node, cst.Assign) else None
        if not isinstance(target, cst.Attribute) or facts.code(binding.value) not in (
            "False",
            "True",
        ):
            continue
        name, owner = target.attr.value, target.value
        if _MISSPELLED.search(name) and facts.code(owner) != "self":
            yield Found(target, f"{facts.code(target)}: the attribute is called requires_grad")
        elif name == "requires_grad" and _is_module(facts, owner):
            yield Found(target, f"{facts.code(target)} is set on a module, not on its parameters")


def _is_module(facts: Facts, owner: cst.BaseExpression) -> bool:
    """Whether a value is certainly a module, and no parameter or tensor of one."""
    constructors = facts.constructors(owner)
    is_module = bool(constructors) and all(facts.is_module_call(call) for call in constructors)
    return is_module and not any(
        re.search(r"Parameter$", facts.meaning(call)) for call in constructors
    )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(before="model.requires_grad = False"),
        looped(before="for p in model.parameters():\n    p.require_grad = False"),
    ),
    healthy=(
        looped(before="model.requires_grad_(False)"),
        looped(before="for p in model.parameters():\n    p.requires_grad = False"),
        looped(before="scale = nn.Parameter(torch.ones(1))\nscale.requires_grad = False\nw = torch.ones(3)\nw.requires_grad = True"),
    ),
)  # fmt: skip
