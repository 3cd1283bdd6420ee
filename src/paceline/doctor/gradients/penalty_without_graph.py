"""A penalty on a gradient is made without the graph of that gradient.

autograd.grad() gives numbers then: the penalty is added to the loss, and changes no parameter.

Fix: create_graph=True in torch.autograd.grad(...).
Source: torch.autograd.grad documentation, create_graph; Gulrajani et al., Improved Training of Wasserstein GANs, 2017.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, turns
from ..lineage import loss_of
from ..rule import Found, ScriptRule

_LENGTH = re.compile(r"norm\(|\*\*\s*2|\.pow\(|\.square\(")


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.calls("autograd.grad"):
        if "create_graph" in by_name(call) or facts.has_stars(call) or len(call.args) > 4:
            continue
        function = facts.script.scope(call)
        if not isinstance(function, cst.FunctionDef) or not _returns_length(facts, function, call):
            continue
        if any(_is_in_loss(facts, one.node) for one in facts.flow.calls_of(function)):
            yield Found(call, "this gradient has no graph, and a penalty of the loss is made of it")


def _returns_length(facts: Facts, function: cst.FunctionDef, call: cst.Call) -> bool:
    """Whether what is returned is a length made of this gradient, and of nothing that is called."""
    made, grown = {facts.bound_to(call)}, True
    while grown:
        more = {
            one.name for one in facts.script.bindings
            if facts.script.scope(one.node) is function and made & facts.script.inside(one.value)
        }  # fmt: skip
        grown = not more <= made
        made |= more
    bound = [one for one in facts.script.bindings if one.name in made]
    text = [facts.code(one.value) for one in bound if facts.script.scope(one.node) is function]
    returned = [
        one.value for one in facts.script.within(function)
        if isinstance(one, cst.Return) and one.value is not None
    ]  # fmt: skip
    is_made = len(returned) == 1 and bool((made - {""}) & facts.script.inside(returned[0]))
    return is_made and any(_LENGTH.search(one) for one in (*text, facts.code(returned[0])))


def _is_in_loss(facts: Facts, call: cst.Call) -> bool:
    """Whether what a call gives is added into a loss that backward() is called of."""
    names: set[str] = set()
    for turn in turns(facts):
        for event in turn.of(CallRole.BACKWARD):
            if facts.method(event.call) != "backward":
                continue
            loss = loss_of(facts, event.call)
            if call in set(facts.script.within(loss)):
                return True
            names |= facts.script.inside(loss)
    for _ in range(3):
        for one in facts.script.bindings:
            if one.name in names:
                names |= {each for each in facts.script.inside(one.value) if each.isidentifier()}
                if call in set(facts.script.within(one.value)):
                    return True
    return False


_WGAN = """
import torch
from torch import nn
D = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(D.parameters(), lr=1e-4)
def penalty(x):
    x = x.requires_grad_(True)
    grad = torch.autograd.grad(D(x).sum(), x{})[0]
    return ((grad.norm(2, dim=1) - 1) ** 2).mean()
for real, fake in pairs:
    loss = D(fake).mean() - D(real).mean() + 10 * penalty(real)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
_ATTACK = """
import torch
from torch import nn
D = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(D.parameters(), lr=1e-4)
def attacked(x):
    x = x.requires_grad_(True)
    grad = torch.autograd.grad(D(x).sum(), x)[0]
    return x + 0.1 * grad.sign()
for real in batches:
    loss = D(attacked(real)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_WGAN.format(""),),
    healthy=(
        _WGAN.format(", create_graph=True"), _ATTACK,
        _WGAN.format("").replace(" + 10 * penalty(real)", "\n    print(penalty(real))"),
    ),
)  # fmt: skip
