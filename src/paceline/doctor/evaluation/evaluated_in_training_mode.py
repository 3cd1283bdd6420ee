"""A model with dropout or batch norm is evaluated in training mode.

Dropout stays active, and batch norm uses the statistics of the test batches and learns them.

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
"""Functions that show a generator's images while it trains; they evaluate nothing."""


def check(facts: Facts) -> Iterator[Found]:
    has_mode_calls = any(True for _ in facts.methods("eval")) or any(
        call.args for call in facts.methods("train")
    )
    if has_mode_calls or not turns(facts) or not has_mode_layers(facts):
        return
    training = {node for turn in turns(facts) for node in _loss_nodes(facts, turn)}
    for call in facts.forward_calls():
        ancestors = list(facts.script.up(call))
        is_looped = any(isinstance(node, cst.For) for node in ancestors)
        is_picture = any(
            isinstance(node, cst.Call) and _PICTURES.search(facts.meaning(node))
            for node in ancestors
        )
        is_evaluation = not is_picture and call not in training
        if is_looped and is_evaluation and facts.is_in(call, r"no_grad$|inference_mode$"):
            yield Found(call, f"{facts.code(call)} under no_grad(), but eval() is never called")
    for found in evaluated_with_gradients.check(facts):
        assert isinstance(found.node, cst.Call)
        yield Found(
            found.node, f"{facts.code(found.node)} in a loop that trains nothing, without eval()"
        )


def _loss_nodes(facts: Facts, turn: TrainingTurn) -> set[cst.CSTNode]:
    """Return the nodes that may go into a loss of a turn, also through the names they are given.

    They train, and their networks are meant to be in training mode: a generator whose images a
    discriminator learns from, the network that makes targets, a momentum encoder's keys.
    """
    backward = {event.call for event in turn.of(CallRole.BACKWARD)}
    pending: list[cst.CSTNode] = [
        node for node in facts.script.within(turn.loop.body)
        if isinstance(node, cst.Call) and _trains(facts, node, backward)
    ]  # fmt: skip
    values = _assigned(facts, turn)
    nodes: set[cst.CSTNode] = set()
    while pending:
        for node in facts.script.within(pending.pop()):
            nodes.add(node)
            if isinstance(node, cst.Name | cst.Attribute):
                pending += values.pop(facts.code(node), [])
    return nodes


def _assigned(facts: Facts, turn: TrainingTurn) -> dict[str, list[cst.CSTNode]]:
    """Return what each name is assigned in a turn, and before it in the loops around it."""
    script, values = facts.script, dict[str, list[cst.CSTNode]]()
    *_, outermost = (
        node for node in (turn.loop, *script.up(turn.loop)) if isinstance(node, AnyLoop)
    )
    end = max(script.order.get(node, 0) for node in script.within(turn.loop))
    nodes = {node for node in script.within(outermost) if script.order.get(node, 0) <= end}
    for binding in script.bindings:
        if binding.node in nodes:
            values.setdefault(binding.name, []).append(binding.value)
    for node in nodes:
        if isinstance(node, cst.AugAssign):
            values.setdefault(facts.code(node.target), []).append(node.value)
    return values


def _trains(facts: Facts, call: cst.Call, backward: set[cst.Call]) -> bool:
    """Whether a call is a backward pass, or calls a function of the script that has one."""
    function = callee(facts, call)
    reached = [] if function is None else facts.flow.reached([function])
    return call in backward or any(
        node in backward for block in reached for node in facts.script.within(block)
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
