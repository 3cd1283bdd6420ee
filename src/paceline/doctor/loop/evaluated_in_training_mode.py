"""A model with dropout or batch norm is evaluated in training mode.

Dropout goes on dropping, and batch norm takes the statistics of the test batches, and learns them.

Fix: model.eval() before, model.train() after.
Source: torch.nn.Module.eval documentation.
"""

from collections.abc import Iterator

import libcst as cst

from ..ends import has_mode_layers
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    is_said = any(True for _ in facts.methods("eval")) or any(
        one.args for one in facts.methods("train")
    )
    if is_said or not turns(facts) or not has_mode_layers(facts):
        return
    for call in facts.forward_calls():
        is_looped = any(isinstance(one, cst.For) for one in facts.script.up(call))
        if is_looped and facts.is_in(call, r"no_grad$|inference_mode$"):
            yield Found(call, f"{facts.code(call)} under no_grad(), and eval() is never called")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(end="with torch.no_grad():\n    for x, y in loader:\n        out = model(x.to(device))"),),
    healthy=(looped(end="model.eval()\nwith torch.no_grad():\n    for x, y in loader:\n        out = model(x.to(device))"),),
)  # fmt: skip
