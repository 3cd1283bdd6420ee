"""A model is put into evaluation mode each epoch, and never back.

From the second epoch on there is no dropout, and batch norm is frozen at the first epoch's.

Fix: model.train() at the beginning of each epoch.
Source: torch.nn.Module.train documentation.
"""

from collections.abc import Iterator

from ..ends import has_mode_layers
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import loops_around, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    if any(True for _ in facts.methods("train")) or not has_mode_layers(facts):
        return
    trained = {
        one for _, optimizer in facts.steps.steps for one in facts.steps.models(optimizer)
    }  # fmt: skip
    for turn in turns(facts):
        outer = set(loops_around(facts, turn))
        for call in facts.methods("eval"):
            is_ours = facts.code(facts.owner(call)) in trained and not call.args
            if is_ours and any(set(chain) & outer for chain in facts.flow.around(call)):
                yield Found(
                    call, f"{facts.code(call)} in the loop over epochs, and train() nowhere"
                )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(after="model.eval()\nwith torch.no_grad():\n    out = model(x)"),),
    healthy=(looped(epoch="model.train()", after="model.eval()\nwith torch.no_grad():\n    out = model(x)"),),
)  # fmt: skip
