"""A network takes part in the loss, and no optimizer has its parameters.

Gradients are computed for it, and it stays as it was made.

Fix: give its parameters to the optimizer; where it is to stay as it is, requires_grad_(False).
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
    every = [networks(facts, one) for _, one in facts.steps.steps]
    if (
        not every
        or not all(every)
        or re.search(r"add_param_group|functional_call", facts.uncommented)
    ):
        return
    trained = set().union(*every)
    seen: set[cst.Call] = set()
    for turn in turns(facts):
        for event in turn.of(CallRole.BACKWARD):
            if facts.method(event.call) != "backward":
                continue
            for one in gradient_paths(facts, loss_of(facts, event.call)):
                made = facts.constructors(one.call.func)
                if len(made) != 1 or made[0] in trained | seen or not _has_own(facts, made[0]):
                    continue
                seen.add(made[0])
                name = facts.code(one.call.func)
                if not _is_elsewhere(facts, one.call.func, trained):
                    yield Found(
                        one.call,
                        f"{name} takes part in the loss, and no optimizer has its parameters",
                    )


def _has_own(facts: Facts, made: cst.Call) -> bool:
    """Whether it is a network with parameters, made here and not loaded."""
    name = facts.meaning(made)
    if name in facts.modules:
        text = facts.code(facts.modules[name])
        return re.search(r"nn\.(Linear|Conv\dd|LSTM|GRU|Embedding)\(", text) is not None
    has_layers = any(
        isinstance(one, cst.Call) and _LAYERS.search(facts.meaning(one))
        for one in facts.script.within(made)
    )
    return _LAYERS.search(name) is not None and has_layers


def _is_elsewhere(facts: Facts, model: cst.BaseExpression, trained: set[cst.Call]) -> bool:
    """Whether it is frozen or loaded by name, part of a trained network, or handed on whole."""
    name = re.escape(facts.code(model))
    if "self." in name or re.search(
        rf"\b{name}\b[^\n]*({_FROZEN})|({_FROZEN})[^\n]*\b{name}\b", facts.uncommented
    ):
        return True
    if re.search(rf"\bfor\b[^\n]*\b{name}\b", facts.uncommented) or re.search(
        rf"\b{name}\.\w*param", facts.uncommented
    ):
        return True
    handed = re.compile(rf"[(,\[=]\s*{name}\s*[,)\]]")
    return handed.search(facts.uncommented) is not None


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
