"""A scheduler is created but never steps.

The learning rate never changes.

Fix: scheduler.step() after each epoch, or after each step if the schedule counts steps.
Source: torch.optim documentation, "How to adjust learning rate".
"""

from collections.abc import Iterator

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import scheduler_bindings, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    if not turns(facts):
        return
    for name, call in scheduler_bindings(facts):
        if name.isidentifier() and facts.script.meaning(call.func).startswith("torch.optim."):
            target = facts.script.statement(call)
            uses = [
                use for use in facts.script.uses(name) if facts.script.statement(use) is not target
            ]
            if not uses:
                yield Found(call, f"{name} is never used again")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)"),),
    healthy=(looped(before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)", after="scheduler.step()"),),
)  # fmt: skip
