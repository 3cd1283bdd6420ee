"""The weights that are trained are float16.

An update below a thousandth of a weight is lost to rounding, and Adam's eps of 1e-8 is 0.

Fix: keep the weights in float32 and use torch.autocast.
Source: Micikevicius and others, Mixed Precision Training, ICLR 2018, section 3.1.
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule

_DEPTH = 8


def check(facts: Facts) -> Iterator[Found]:
    if not turns(facts):
        return
    for call in facts.methods("half"):
        owner = facts.owner(call)
        names = {facts.code(owner), facts.bound_to(call)}
        steps = [
            step for step, optimizer in facts.steps.steps
            if names & facts.steps.models(optimizer).keys()
        ]  # fmt: skip
        if facts.is_model(owner) and not all(_is_over(facts, step, call) for step in steps):
            yield Found(call, f"{facts.code(call)}: its parameters are trained in float16")


def _is_over(facts: Facts, step: cst.Call, call: cst.Call) -> bool:
    """Whether the last step is made before a call: a model that is exported trains no more."""
    step_loops, call_loops = (
        {loop for chain in facts.flow.around(node) for loop in chain} for node in (step, call)
    )
    return step_loops.isdisjoint(call_loops) and (
        max(_call_paths(facts, step)) < min(_call_paths(facts, call))
    )


def _call_paths(facts: Facts, node: cst.CSTNode, depth: int = 0) -> list[tuple[int, ...]]:
    """Return each path of calls to a node, as positions in the text, the outermost call first."""
    position = facts.script.order[node]
    calls = facts.flow.calls_of(facts.script.scope(node)) if depth < _DEPTH else []
    paths = [path for call in calls for path in _call_paths(facts, call.node, depth + 1)]
    return [(*path, position) for path in paths or [()]]


_MAIN = """
import torch
from torch import nn
def save(model):
    torch.save(model.half().state_dict(), "m.pt")
def train(model, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
def main():
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {}
main()
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(before="model.half()"), looped(after="model.half()"),
        _MAIN.format("model = model.half()\n    train(model, optimizer)"),
    ),
    healthy=(
        looped(), looped(end="model.eval()\nexported = model.cpu()"),
        looped(end="model.half()\ntorch.save(model.state_dict(), 'm.pt')"),
        _MAIN.format("train(model, optimizer)\n    save(model)"),
    ),
)  # fmt: skip
