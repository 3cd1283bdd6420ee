"""A gradient penalty is computed without the graph of that gradient.

autograd.grad() then returns plain numbers: the penalty is added to the loss but changes no
parameter.

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
        if any(_is_in_loss(facts, site.node) for site in facts.flow.calls_of(function)):
            yield Found(
                call, "this gradient has no graph, but the loss has a penalty computed from it"
            )


def _returns_length(facts: Facts, function: cst.FunctionDef, call: cst.Call) -> bool:
    """Whether a function returns a length that it computes from this gradient."""
    names, has_grown = {facts.bound_to(call)}, True  # the gradient, and what depends on it
    while has_grown:
        dependent = {
            binding.name for binding in facts.script.bindings
            if facts.script.scope(binding.node) is function
            and names & facts.script.inside(binding.value)
        }  # fmt: skip
        has_grown = not dependent <= names
        names |= dependent
    values = [
        facts.code(binding.value) for binding in facts.script.bindings
        if binding.name in names and facts.script.scope(binding.node) is function
    ]  # fmt: skip
    returned = [
        node.value for node in facts.script.within(function)
        if isinstance(node, cst.Return) and node.value is not None
    ]  # fmt: skip
    is_computed = len(returned) == 1 and bool((names - {""}) & facts.script.inside(returned[0]))
    return is_computed and any(_LENGTH.search(code) for code in (*values, facts.code(returned[0])))


def _is_in_loss(facts: Facts, call: cst.Call) -> bool:
    """Whether the result of a call is added into a loss that backward() is called on."""
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
        for binding in facts.script.bindings:
            if binding.name in names:
                names |= {
                    code for code in facts.script.inside(binding.value) if code.isidentifier()
                }
                if call in set(facts.script.within(binding.value)):
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
