"""The log-probabilities of the old policy are stored with their graph.

The ratio of new to old has no gradient in the first pass, since both are the same policy, and the
second backward() raises "Trying to backward through the graph a second time".

Fix: collect under torch.no_grad(), or store dist.log_prob(action).detach().
Source: Schulman, Wolski, Dhariwal, Radford, Klimov, Proximal Policy Optimization, 2017, section 3.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..facts import Facts
from ..findings import Severity
from ..lineage import gradient_paths, last_value
from ..rule import Found, ScriptRule

_STACKS = re.compile(r"^torch\.(stack|cat|concat)$")


def check(facts: Facts) -> Iterator[Found]:
    seen: set[cst.CSTNode] = set()
    for call in facts.script.every_call:
        difference = _power(facts, call)
        if difference is None or not _is_new(facts, difference.left):
            continue
        for log_prob in _kept_with_graph(facts, difference.right):
            if log_prob not in seen:
                seen.add(log_prob)
                yield Found(log_prob, f"{facts.code(log_prob)} is stored with its graph")


def _power(facts: Facts, call: cst.Call) -> cst.BinaryOperation | None:
    """Return ``new - old`` of ``torch.exp(new - old)`` or ``(new - old).exp()``, or None."""
    if facts.meaning(call) == "torch.exp" and positional(call):
        power = positional(call)[0]
    elif facts.method(call) == "exp" and not call.args:
        power = facts.owner(call)
    else:
        return None
    if isinstance(power, cst.BinaryOperation) and isinstance(power.operator, cst.Subtract):
        return power
    return None


def _is_new(facts: Facts, expr: cst.BaseExpression) -> bool:
    value = last_value(facts, expr) if isinstance(expr, cst.Name) else expr
    return value is not None and "log_prob(" in facts.code(value)


def _kept_with_graph(facts: Facts, old: cst.BaseExpression) -> Iterator[cst.Call]:
    """Yield the log-probabilities with a graph in the list that the old ones are stacked from."""
    origins = [origin for origin in facts.flow.origins(old) if isinstance(origin, cst.Call)]
    is_stacked = all(_STACKS.search(facts.meaning(origin)) for origin in origins)
    for stack in origins if is_stacked else ():
        stacked = positional(stack)[:1]
        scope = facts.script.scope(stack)
        for call in facts.methods("append") if stacked else ():
            is_same = facts.code(facts.owner(call)) == facts.code(stacked[0])
            if is_same and facts.script.scope(call) is scope:
                item = positional(call)[0] if positional(call) else None
                if isinstance(item, cst.Name):
                    item = last_value(facts, item)
                if isinstance(item, cst.Call) and _has_graph(facts, item):
                    yield item


def _has_graph(facts: Facts, call: cst.Call) -> bool:
    """Whether a call is the log_prob() of a distribution that a model parametrizes, with a graph."""
    if facts.method(call) != "log_prob" or facts.is_in(call, r"no_grad$|inference_mode$"):
        return False
    return any(True for _ in gradient_paths(facts, facts.owner(call)))


_PPO = """
import torch
from torch import nn
from torch.distributions import Categorical
policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
def collect(env):
    states, actions, kept = [], [], []
    for s in env:
        dist = Categorical(logits=policy(s))
        a = dist.sample()
        states.append(s)
        actions.append(a)
        kept.append({})
    return torch.stack(states), torch.stack(actions), torch.stack(kept)
for update in range(10):
    states, actions, old = collect(env)
    for _ in range(4):
        dist = Categorical(logits=policy(states))
        ratio = (dist.log_prob(actions) - old{}).exp()
        loss = -ratio.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_PPO.format("dist.log_prob(a)", ""),),
    healthy=(
        _PPO.format("dist.log_prob(a).detach()", ""), _PPO.format("dist.log_prob(a)", ".detach()"),
        _PPO.format("dist.log_prob(a)", "").replace("def collect", "@torch.no_grad()\ndef collect"),
        _PPO.format("dist.log_prob(a)", "").replace("old = collect(env)", "old = collect(env)\n    old = old.detach()"),
    ),
)  # fmt: skip
