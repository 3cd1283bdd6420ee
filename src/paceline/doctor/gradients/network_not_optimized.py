"""A network takes part in the loss, but no optimizer has its parameters.

Gradients are computed for it, but it never changes.

Fix: pass its parameters to the optimizer; if it should stay as it is, requires_grad_(False).
Source: torch.optim documentation: "you have to give it an iterable containing the parameters".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, turns
from ..lineage import gradient_paths, loss_of, networks
from ..rule import Found, ScriptRule

_FROZEN = r"load_state_dict|requires_grad|\.data\b|copy_|deepcopy|no_grad|load\("
_LAYERS = re.compile(r"(^|\.)nn\.(Linear|Conv\dd|Sequential|LSTM|GRU|Embedding)$")


def check(facts: Facts) -> Iterator[Found]:
    optimized = [networks(facts, optimizer) for _, optimizer in facts.steps.steps]
    if (
        not optimized
        or not all(optimized)
        or re.search(r"add_param_group|functional_call", facts.uncommented)
    ):
        return
    trained = set().union(*optimized)
    seen: set[cst.Call] = set()
    for turn in turns(facts):
        for event in turn.of(CallRole.BACKWARD):
            if facts.method(event.call) != "backward":
                continue
            for path in gradient_paths(facts, loss_of(facts, event.call)):
                model = path.call.func
                constructors = facts.constructors(model)
                if len(constructors) != 1 or constructors[0] in trained | seen:
                    continue
                if not _has_own_parameters(facts, constructors[0]):
                    continue
                seen.add(constructors[0])
                if not _is_elsewhere(facts, model, trained):
                    yield Found(
                        path.call,
                        f"{facts.code(model)} takes part in the loss, but no optimizer has its "
                        "parameters",
                    )


def _has_own_parameters(facts: Facts, constructor: cst.Call) -> bool:
    """Whether a call makes a network with parameters, and does not load one."""
    name = facts.meaning(constructor)
    if name in facts.modules:
        code = facts.code(facts.modules[name])
        return re.search(r"nn\.(Linear|Conv\dd|LSTM|GRU|Embedding)\(", code) is not None
    has_layers = any(
        isinstance(node, cst.Call) and _LAYERS.search(facts.meaning(node))
        for node in facts.script.within(constructor)
    )
    return _LAYERS.search(name) is not None and has_layers


def _is_elsewhere(facts: Facts, model: cst.BaseExpression, trained: set[cst.Call]) -> bool:
    """Whether a model is frozen or loaded by name, part of another network, or passed on whole."""
    name = re.escape(facts.code(model))
    if "self." in name or re.search(
        rf"\b{name}\b[^\n]*({_FROZEN})|({_FROZEN})[^\n]*\b{name}\b", facts.uncommented
    ):
        return True
    if re.search(rf"\bfor\b[^\n]*\b{name}\b", facts.uncommented) or re.search(
        rf"\b{name}\.\w*param", facts.uncommented
    ):
        return True
    passed_on = re.compile(rf"[(,\[=]\s*{name}\s*[,)\]]")
    return passed_on.search(facts.uncommented) is not None


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP[:2], "loss = loss_fn(head(model(x)), y)", *STEP[3:]], before="head = nn.Linear(8, 8).to(device)"),),
    healthy=(
        looped([*STEP[:2], "loss = loss_fn(head(model(x)), y)", *STEP[3:]], before="head = nn.Linear(8, 8).to(device)\nhead.requires_grad_(False)"),
        looped([*STEP[:2], "loss = loss_fn(head(model(x)), y)", *STEP[3:]], before="head = nn.Linear(8, 8).to(device)\nhead.load_state_dict(torch.load('head.pt'))"),
        looped([*STEP[:2], "loss = loss_fn(head(model(x)), y)", *STEP[3:]], before="head = nn.Linear(8, 8).to(device)\noptimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)"),
        looped([*STEP[:2], "loss = loss_fn(head(model(x)), y)", *STEP[3:]], before="head = nn.Linear(8, 8).to(device)\nboth = nn.ModuleList([model, head])\noptimizer = torch.optim.SGD(both.parameters(), lr=0.1)"),
        looped([*STEP[:2], "loss = loss_fn(model(x), y) + (model(x) - target(x).detach()).pow(2).mean()", *STEP[3:]], before="target = nn.Linear(16, 8).to(device)"),
    ),
)  # fmt: skip
