"""The result of ``load_state_dict`` is used as the model.

It loads in place and returns the keys that did not match, not a model.

Fix: call it on a line of its own, and use the model.
Source: torch.nn.Module.load_state_dict documentation, Returns: "NamedTuple with missing_keys and unexpected_keys".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.methods("load_state_dict"):
        statement = facts.script.statement(call)
        if not isinstance(statement, cst.Assign) or statement.value is not call:
            continue
        name = facts.code(statement.targets[0].target)
        is_same = name == facts.code(facts.owner(call))
        used = re.compile(
            rf"(?m)^[^#\n]*\b{re.escape(name)}(\.(eval|train|to|cuda|parameters)\(|\()"
        )
        is_alone = sum(binding.name == name for binding in facts.script.bindings) == 1
        if is_same or (is_alone and used.search(facts.uncommented)):
            yield Found(call, f"{name} is the result of load_state_dict, not a model")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(before="model = model.load_state_dict(torch.load('a.pt'))"),
        looped(end="loaded = nn.Linear(16, 8).load_state_dict(torch.load('a.pt'))\nloaded.eval()"),
    ),
    healthy=(
        looped(before="model.load_state_dict(torch.load('a.pt'))"),
        looped(before="result = model.load_state_dict(torch.load('a.pt'), strict=False)\nprint(result.missing_keys)"),
    ),
)  # fmt: skip
