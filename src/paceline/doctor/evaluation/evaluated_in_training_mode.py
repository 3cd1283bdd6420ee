"""A model with dropout or batch norm is evaluated in training mode.

Dropout goes on dropping, and batch norm takes the statistics of the test batches, and learns them.

Fix: model.eval() before, model.train() after.
Source: torch.nn.Module.eval documentation.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..ends import has_mode_layers
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule
from . import evaluated_with_gradients

_PICTURES = re.compile(r"(^|\.)(save_image|make_grid)$")
"""What shows a generator's work while it trains: nothing is judged by it."""


def check(facts: Facts) -> Iterator[Found]:
    is_said = any(True for _ in facts.methods("eval")) or any(
        one.args for one in facts.methods("train")
    )
    if is_said or not turns(facts) or not has_mode_layers(facts):
        return
    for call in facts.forward_calls():
        above = list(facts.script.up(call))
        is_looped = any(isinstance(one, cst.For) for one in above)
        is_picture = any(
            isinstance(one, cst.Call) and _PICTURES.search(facts.meaning(one)) for one in above
        )
        if is_looped and not is_picture and facts.is_in(call, r"no_grad$|inference_mode$"):
            yield Found(call, f"{facts.code(call)} under no_grad(), and eval() is never called")
    for one in evaluated_with_gradients.check(facts):
        assert isinstance(one.node, cst.Call)
        yield Found(
            one.node, f"{facts.code(one.node)} in a loop that trains nothing, and never eval()"
        )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(end="with torch.no_grad():\n    for x, y in loader:\n        out = model(x.to(device))"),
        looped(end="for x, y in loader:\n    correct = (model(x.to(device)).argmax(1) == y.to(device)).sum()"),
    ),
    healthy=(
        looped(after="with torch.no_grad():\n    save_image(model(x), 'seen.png')"),
        looped(end="model.eval()\nwith torch.no_grad():\n    for x, y in loader:\n        out = model(x.to(device))"),),
)  # fmt: skip
