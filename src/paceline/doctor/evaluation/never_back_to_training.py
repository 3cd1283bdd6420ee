"""A model is put into evaluation mode each epoch, but never back into training mode.

From the second epoch on there is no dropout, and batch norm keeps the statistics of the first
epoch.

Fix: model.train() at the beginning of each epoch.
Source: torch.nn.Module.train documentation.
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.dataflow import AnyLoop
from ..ends import has_mode_layers
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import loops_around, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    if not has_mode_layers(facts):
        return
    trained = {
        model for _, optimizer in facts.steps.steps for model in facts.steps.models(optimizer)
    }  # fmt: skip
    for turn in turns(facts):
        outer = set(loops_around(facts, turn))
        if any(_may_be_back(facts, call, outer) for call in facts.methods("train")):
            continue
        for call in facts.methods("eval"):
            is_trained = facts.code(facts.owner(call)) in trained and not call.args
            if is_trained and any(set(chain) & outer for chain in facts.flow.around(call)):
                yield Found(
                    call, f"{facts.code(call)} in the loop over epochs, but no train() in it"
                )


def _may_be_back(facts: Facts, train: cst.Call, outer: set[AnyLoop]) -> bool:
    """Whether a train() is in the loop over epochs, or where its callers cannot be seen."""
    chains = facts.flow.around(train)
    is_unseen = facts.script.scope(train) is not facts.script.module and not any(chains)
    return is_unseen or any(set(chain) & outer for chain in chains)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(after="model.eval()\nwith torch.no_grad():\n    out = model(x)"),
        looped(before="model.train()", after="model.eval()\nwith torch.no_grad():\n    out = model(x)"),
    ),
    healthy=(looped(epoch="model.train()", after="model.eval()\nwith torch.no_grad():\n    out = model(x)"),),
)  # fmt: skip
