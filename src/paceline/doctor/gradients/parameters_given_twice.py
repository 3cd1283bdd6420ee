"""An optimizer gets the parameters of one network twice.

Across groups torch refuses that; within one list each update is made twice, and usually another
network was meant, which is then never trained.

Fix: name each network once.
Source: torch.optim.Optimizer.add_param_group: "some parameters appear in more than one parameter group".
"""

import re
from collections import Counter
from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_OPTIMIZER = re.compile(r"(^|\.)optim\.[A-Z]\w*$")


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.every_call:
        if not _OPTIMIZER.search(facts.meaning(call)) or not call.args:
            continue
        parameters = call.args[0].value
        if any(isinstance(node, cst.ListComp | cst.GeneratorExp | cst.Lambda | cst.IfExp)
               for node in facts.script.within(parameters)):  # fmt: skip
            continue
        owners = Counter(
            facts.code(facts.owner(node)) for node in facts.script.within(parameters)
            if isinstance(node, cst.Call) and facts.method(node) == "parameters" and not node.args
        )  # fmt: skip
        for name, count in owners.items():
            if count > 1:
                yield Found(call, f"{name}.parameters() is passed {count} times")


_MADE = "optimizer = torch.optim.SGD({}, lr=0.1)"
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(before=_MADE.format("list(model.parameters()) + list(model.parameters())")),
        looped(before=_MADE.format("[{'params': model.parameters()}, {'params': model.parameters(), 'lr': 1.0}]")),
    ),
    healthy=(
        looped(),
        looped(before="head = nn.Linear(8, 8)\n" + _MADE.format("list(model.parameters()) + list(head.parameters())")),
        looped(before=_MADE.format("[{'params': [p for p in model.parameters() if p.ndim > 1]}, {'params': [p for p in model.parameters() if p.ndim < 2]}]")),
    ),
)  # fmt: skip
