"""The advantage that weighs a policy's log-probabilities still has a gradient.

The policy's loss then trains the value network, too: towards values that make the loss small, not
towards the returns.

Fix: advantage = (returns - values).detach().
Source: Sutton, Barto, Reinforcement Learning, 2018, section 13.4: the baseline is no function of what is learnt.
"""

from collections.abc import Iterator

import libcst as cst

from ..facts import Facts
from ..findings import Severity
from ..lineage import gradient_paths, last_value
from ..rule import Found, ScriptRule

_DEPTH = 4


def check(facts: Facts) -> Iterator[Found]:
    if len({facts.code(optimizer) for _, optimizer in facts.steps.steps}) != 1:
        return
    seen: set[cst.CSTNode] = set()
    for node in facts.script.nodes:
        if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Multiply):
            continue
        for weight, other in ((node.left, node.right), (node.right, node.left)):
            root = _difference(facts, weight)
            is_weight = root is not None and any(True for _ in gradient_paths(facts, weight))
            if is_weight and _has_log_prob(facts, other) and root not in seen:
                assert root is not None
                seen.add(root)
                yield Found(
                    root, f"{facts.code(root)} is not detached but weighs log-probabilities"
                )


def _difference(
    facts: Facts, expr: cst.BaseExpression, depth: int = 0
) -> cst.BaseExpression | None:
    """Return the difference that a weight is, seen through a normalization, or None."""
    if depth > _DEPTH:
        return None
    if isinstance(expr, cst.Name):
        value = last_value(facts, expr)
        return None if value is None else _difference(facts, value, depth + 1)
    if isinstance(expr, cst.BinaryOperation):
        if isinstance(expr.operator, cst.Divide):
            return _difference(facts, expr.left, depth + 1)
        if isinstance(expr.operator, cst.Subtract):
            inner = _difference(facts, expr.left, depth + 1)
            return inner if inner is not None else expr
    return None


def _has_log_prob(facts: Facts, expr: cst.BaseExpression, depth: int = 0) -> bool:
    """Whether a value is computed from ``log_prob(...)``."""
    for node in facts.script.within(expr):
        if isinstance(node, cst.Call) and facts.method(node) == "log_prob":
            return True
        if isinstance(node, cst.Name) and depth < _DEPTH:
            value = last_value(facts, node)
            if value is not None and _has_log_prob(facts, value, depth + 1):
                return True
    return False


_A2C = """
import torch
from torch import nn
from torch.distributions import Categorical
policy, value = nn.Linear(4, 2), nn.Linear(4, 1)
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-4)
for states, actions, returns in batches:
    v = value(states).squeeze(-1)
    advantage = {}
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    logps = Categorical(logits=policy(states)).log_prob(actions)
    loss = -(logps * advantage).mean() + (returns - v).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_A2C.format("returns - v"),),
    healthy=(
        _A2C.format("returns - v.detach()"), _A2C.format("(returns - v).detach()"),
        _A2C.format("returns - returns.mean()"),
        _A2C.format("returns - v").replace("    v = ", "    with torch.no_grad():\n        w = value(states)\n    v = ").replace("returns - v\n", "returns - w\n"),
        _A2C.format("returns - v").replace("logps * advantage", "logps * advantage.detach()"),
    ),
)  # fmt: skip
