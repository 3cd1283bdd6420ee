"""A model with dropout or batch norm is evaluated in training mode.

Dropout goes on dropping, and batch norm takes the statistics of the test batches, and learns them.

Fix: model.eval() before, model.train() after.
Source: torch.nn.Module.eval documentation.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.dataflow import AnyLoop
from ..ends import has_mode_layers
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, TrainingTurn, callee, turns
from ..rule import Found, ScriptRule
from . import evaluated_with_gradients

_PICTURES = re.compile(r"(^|\.)(save_image|make_grid)$")
"""What shows a generator's work while it trains: nothing is judged by it."""


def check(facts: Facts) -> Iterator[Found]:
    is_said = any(True for _ in facts.methods("eval")) or any(
        one.args for one in facts.methods("train")
    )
    if is_said or not turns(facts) or not has_mode_layers(facts):
        return
    trained = {one for turn in turns(facts) for one in _into_losses(facts, turn)}
    for call in facts.forward_calls():
        above = list(facts.script.up(call))
        is_looped = any(isinstance(one, cst.For) for one in above)
        is_picture = any(
            isinstance(one, cst.Call) and _PICTURES.search(facts.meaning(one)) for one in above
        )
        is_other = is_picture or call in trained
        if is_looped and not is_other and facts.is_in(call, r"no_grad$|inference_mode$"):
            yield Found(call, f"{facts.code(call)} under no_grad(), and eval() is never called")
    for one in evaluated_with_gradients.check(facts):
        assert isinstance(one.node, cst.Call)
        yield Found(
            one.node, f"{facts.code(one.node)} in a loop that trains nothing, and never eval()"
        )


def _into_losses(facts: Facts, turn: TrainingTurn) -> set[cst.CSTNode]:
    """What may go into a loss of a turn, by its names: a generator's work, targets, momentum's keys.

    That is training, and its networks are meant to be in training mode.
    """
    backward = {one.call for one in turn.of(CallRole.BACKWARD)}
    coming: list[cst.CSTNode] = [
        one for one in facts.script.within(turn.loop.body)
        if isinstance(one, cst.Call) and _trains(facts, one, backward)
    ]  # fmt: skip
    values = _assigned(facts, turn)
    found: set[cst.CSTNode] = set()
    while coming:
        for node in facts.script.within(coming.pop()):
            found.add(node)
            if isinstance(node, cst.Name | cst.Attribute):
                coming += values.pop(facts.code(node), [])
    return found


def _assigned(facts: Facts, turn: TrainingTurn) -> dict[str, list[cst.CSTNode]]:
    """What names get in a turn, and before it in the loops that it stands in."""
    script, found = facts.script, dict[str, list[cst.CSTNode]]()
    *_, whole = (one for one in (turn.loop, *script.up(turn.loop)) if isinstance(one, AnyLoop))
    end = max(script.order.get(one, 0) for one in script.within(turn.loop))
    here = {one for one in script.within(whole) if script.order.get(one, 0) <= end}
    for one in script.bindings:
        if one.node in here:
            found.setdefault(one.name, []).append(one.value)
    for node in here:
        if isinstance(node, cst.AugAssign):
            found.setdefault(facts.code(node.target), []).append(node.value)
    return found


def _trains(facts: Facts, call: cst.Call, backward: set[cst.Call]) -> bool:
    """Whether this is a backward pass, or a function of the script's own that has one."""
    function = callee(facts, call)
    reached = [] if function is None else facts.flow.reached([function])
    return call in backward or any(
        one in backward for block in reached for one in facts.script.within(block)
    )


_GAN = """
import torch
from torch import nn
from torch.nn import functional as F
G = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
D = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
opt_g = torch.optim.Adam(G.parameters())
opt_d = torch.optim.Adam(D.parameters())
def trained(real, fake):
    opt_d.zero_grad()
    loss = D(fake).mean() - D(real).mean()
    loss.backward()
    opt_d.step()
for real in loader:
    with torch.no_grad():
        fake = G(torch.randn(real.size(0), 8))
    opt_d.zero_grad()
    d_loss = D(fake).mean()
    d_loss += -D(real).mean()
    d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    g_loss = -D(G(torch.randn(real.size(0), 8))).mean()
    g_loss.backward()
    opt_g.step()
"""
_BY_FUNCTION = "    trained(real, fake)\n    opt_g.zero_grad()"
_MOMENTUM = """
import copy
import torch
from torch import nn
from torch.nn import functional as F
online = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
target = copy.deepcopy(online)
optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
for first, second in loader:
    with torch.no_grad():
        for p, q in zip(target.parameters(), online.parameters()):
            p.lerp_(q, 0.01)
        wanted = F.normalize(target(second), dim=1)
    loss = 2 - 2 * (F.normalize(online(first), dim=1) * wanted).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_WHOLE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        hits = (model(x_test).argmax(1) == y_test).float().mean()
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(end="with torch.no_grad():\n    for x, y in loader:\n        out = model(x.to(device))"),
        looped(end="for x, y in loader:\n    correct = (model(x.to(device)).argmax(1) == y.to(device)).sum()"),
        _WHOLE,
    ),
    healthy=(
        looped(after="with torch.no_grad():\n    save_image(model(x), 'seen.png')"),
        looped(end="model.eval()\nwith torch.no_grad():\n    for x, y in loader:\n        out = model(x.to(device))"),
        _GAN, re.sub(r"(?s)    opt_d.zero_grad\(\)\n    d_loss = .*?    opt_g.zero_grad\(\)", _BY_FUNCTION, _GAN), _MOMENTUM,
    ),
)  # fmt: skip
