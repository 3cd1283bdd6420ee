"""Gradients are never set to zero.

backward() adds to the existing gradients, so each step uses the sum over all batches so far.

Fix: optimizer.zero_grad() once a step, before backward().
Source: torch.optim documentation, "Taking an optimization step".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, turns
from ..rule import Found, ScriptRule

_ZEROES = re.compile(
    r"zero_grad|\.grad\s*=\s*None|grad\.zero_|set_to_none|\.grad\.data\.zero_|grad\.fill_"
)


def check(facts: Facts) -> Iterator[Found]:
    if not _ZEROES.search(facts.uncommented):
        for turn in turns(facts):
            step = turn.of(CallRole.STEP)[0]
            if step.is_scaled or _optimizers(facts, facts.owner(step.call)):
                yield Found(step.call, f"{facts.code(step.call)}, but no zero_grad() anywhere")
        return
    zeroed = _zeroed(facts)
    for turn in turns(facts) if zeroed else ():
        for step in turn.of(CallRole.STEP):
            optimizers = set() if step.is_scaled else _optimizers(facts, facts.owner(step.call))
            if optimizers and not optimizers & zeroed:
                yield Found(
                    step.call,
                    f"{facts.code(step.call)}, but zero_grad() only of other optimizers",
                )


def _optimizers(facts: Facts, owner: cst.BaseExpression) -> set[cst.CSTNode]:
    """Return the calls that may have made an optimizer."""
    return {
        origin for origin in facts.flow.origins(owner) if "torch.optim" in facts.meaning(origin)
    }


def _zeroed(facts: Facts) -> set[cst.CSTNode]:
    """Return the optimizers whose zero_grad() is called; empty if anything else zeroes, too."""
    calls = list(facts.methods("zero_grad"))
    optimizers = [_optimizers(facts, facts.owner(call)) for call in calls]
    is_all = len(_ZEROES.findall(re.sub(r"set_to_none", "", facts.uncommented))) == len(calls)
    return set().union(*optimizers) if is_all and all(optimizers) else set()


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped([line for line in STEP if "zero_grad" not in line]),
        looped([*STEP, "other.step()"], before="other = torch.optim.SGD(model.parameters(), lr=0.1)"),
    ),
    healthy=(
        looped([*STEP, "other.zero_grad()", "other.step()"], before="other = torch.optim.SGD(model.parameters(), lr=0.1)"),
        looped([*STEP, "model.zero_grad()", "other.step()"], before="other = torch.optim.SGD(model.parameters(), lr=0.1)"),
        looped(), looped([line.replace("optimizer.zero_grad()", "model.zero_grad()") for line in STEP]),),
)  # fmt: skip
