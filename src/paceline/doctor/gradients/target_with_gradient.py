"""The target of a Q-network is computed with its gradient.

The step then also moves the value of the next state towards this one's: this is no longer
Q-learning, and it usually does not converge to it.

Fix: compute the target under torch.no_grad(), or detach() it.
Source: Sutton, Barto, Reinforcement Learning, 2018, section 11.5: the naive residual gradient; PyTorch, DQN tutorial.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..facts import Facts
from ..findings import Severity
from ..lineage import gradient_paths, last_value, networks
from ..rule import Found, ScriptRule

_LOSSES = ("MSELoss", "mse_loss", "SmoothL1Loss", "smooth_l1_loss", "HuberLoss", "huber_loss")


def check(facts: Facts) -> Iterator[Found]:
    trained = [networks(facts, optimizer) for _, optimizer in facts.steps.steps]
    for call in facts.script.every_call:
        arguments = positional(call)
        if facts.loss_kind(call) not in _LOSSES or len(arguments) < 2:
            continue
        target = _value(facts, arguments[1])
        if not isinstance(target, cst.BinaryOperation) or not isinstance(target.operator, cst.Add):
            continue
        predicting = [
            set(facts.constructors(path.call.func)) for path in gradient_paths(facts, arguments[0])
        ]
        for side in (target.left, target.right):
            if not _is_best_next(facts, side):
                continue
            for path in gradient_paths(facts, side):
                network = set(facts.constructors(path.call.func))
                if network in predicting and any(network <= optimized for optimized in trained):
                    yield Found(path.call, f"{facts.code(path.call)} gives the target its gradient")


def _value(facts: Facts, expr: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the value of a target, seen through names and ``unsqueeze(1)``, or None."""
    for _ in range(4):
        if isinstance(expr, cst.Call) and facts.method(expr) in ("unsqueeze", "view", "squeeze"):
            expr = facts.owner(expr)
        elif isinstance(expr, cst.Name):
            value = last_value(facts, expr)
            if value is None:
                return None
            expr = value
    return expr


def _is_best_next(facts: Facts, expr: cst.BaseExpression) -> bool:
    """Whether a value is ``gamma * ... max(...)``, also through names."""
    if not isinstance(expr, cst.BinaryOperation) or not isinstance(expr.operator, cst.Multiply):
        return False
    code = facts.code(expr)
    for node in facts.script.within(expr):
        value = last_value(facts, node) if isinstance(node, cst.Name) else None
        code += "" if value is None else facts.code(value)
    return re.search(r"\bmax\(|\bamax\(", code) is not None


_DQN = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
old = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for s, a, r, after, done in batches:
    q = net(s).gather(1, a).squeeze(1)
    best = {}
    target = r + 0.99 * best * (1 - done)
    loss = nn.functional.mse_loss(q, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_DQN.format("net(after).max(1)[0]"), _DQN.format("net(after).max(1).values")),
    healthy=(
        _DQN.format("net(after).max(1)[0].detach()"), _DQN.format("old(after).max(1)[0]"),
        _DQN.format("net(after).max(1)[0]").replace("mse_loss(q, target)", "mse_loss(q, target.detach())"),
        _DQN.format("0").replace("    target =", "    with torch.no_grad():\n        best = net(after).max(1)[0]\n    target ="),
    ),
)  # fmt: skip
