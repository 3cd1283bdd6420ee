"""An average of the weights is updated parameter by parameter.

Each parameter costs a call or two into torch, and on a device a kernel or two, in every step; torch
has one call for all of them.

Fix: torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)).
Source: torch.optim.swa_utils documentation, "Custom averaging strategies".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, TrainingTurn, always_reached, branches_between, turns
from ..rule import Found, ScriptRule

_PAIRS = re.compile(r"^zip\(.*\.parameters\(\).*\.parameters\(\).*\)$", re.DOTALL)
_AVERAGES = re.compile(r"\.mul_\(.*\.add_\(|\.lerp_\(|\.copy_\(.*\*.*\+|\.data\s*=.*\*.*\+")


def check(facts: Facts) -> Iterator[Found]:
    if not facts.has_accelerator:
        return
    nodes = [
        *always_reached(facts),
        *(node for turn in turns(facts) for node in _beside_steps(facts, turn)),
    ]
    for loop in dict.fromkeys(node for node in nodes if isinstance(node, cst.For)):
        lines = [line for line in loop.body.body if isinstance(line, cst.SimpleStatementLine)]
        is_over_pairs = _PAIRS.match(facts.code(loop.iter)) is not None
        if is_over_pairs and len(lines) == 1 and _AVERAGES.search(facts.code(lines[0])):
            yield Found(loop, f"{facts.code(lines[0])} for each parameter separately")


def _beside_steps(facts: Facts, turn: TrainingTurn) -> Iterator[cst.CSTNode]:
    """Yield the nodes in the same branch as a step, since an optimizer may not step every turn."""
    step_branches = {step.branches for step in turn.of(CallRole.STEP)}
    for node in facts.script.within(turn.loop.body):
        if tuple(branches_between(facts, node, turn.loop.body)) in step_branches:
            yield node


_EMA = (
    "with torch.no_grad():\n    for a, b in zip(ema.parameters(), model.parameters()):\n        {}"
)
RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(
        looped([*STEP, _EMA.format("a.mul_(0.999).add_(b, alpha=0.001)")], before="import copy\nema = copy.deepcopy(model)"),
        looped([*STEP[:4], "if step % 4 == 0:\n    optimizer.step()\n    for a, b in zip(ema.parameters(), model.parameters()):\n        a.lerp_(b, 0.001)"], before="import copy\nema, step = copy.deepcopy(model), 0"),
        looped([*STEP, _EMA.format("a.data = 0.999 * a.data + 0.001 * b.data")], before="import copy\nema = copy.deepcopy(model)"),
    ),
    healthy=(
        looped([*STEP, "ema.update_parameters(model)"], before="ema = torch.optim.swa_utils.AveragedModel(model)"),
        looped([*STEP, _EMA.format("a.copy_(b)")], before="import copy\nema = copy.deepcopy(model)"),
        looped(after=_EMA.format("a.mul_(0.999).add_(b, alpha=0.001)"), before="import copy\nema = copy.deepcopy(model)"),
    ),
)  # fmt: skip
