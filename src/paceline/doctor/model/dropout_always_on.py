"""``F.dropout`` in a module does not get the training flag.

The function drops by default, even after eval(): every evaluation runs with dropout.

Fix: training=self.training, or nn.Dropout as a layer.
Source: torch.nn.functional.dropout documentation: training, default True.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import TreeEdits
from ..facts import Facts
from ..findings import Severity
from ..mends import set_arguments
from ..rule import Found, ScriptRule

_DROPOUT = re.compile(r"(^|\.)functional\.(alpha_|feature_alpha_)?dropout[123]?d?$")


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.every_call:
        if not _DROPOUT.search(facts.meaning(call)) or facts.has_stars(call):
            continue
        scope = facts.script.scope(call)
        owner = facts.flow.owner(scope)
        is_guarded = any(
            isinstance(ancestor, cst.If | cst.IfExp) and "training" in facts.code(ancestor.test)
            for ancestor in facts.script.up(call)
        )
        is_in_module = owner is not None and owner.name.value in facts.modules
        if is_in_module and facts.argument(call, "training", 2) is None and not is_guarded:
            yield Found(call, f"{facts.code(call)} drops in evaluation, too")


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """Pass ``training=self.training``, which leaves training as it is."""
    assert isinstance(node, cst.Call)
    scope = facts.script.scope(node)
    if isinstance(scope, cst.FunctionDef) and scope.name.value == "forward":
        set_arguments(edits, node, training="self.training")


_NET = """
from torch import nn
import torch.nn.functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
    def forward(self, x):
        return self.fc(F.dropout(x{}))
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_NET.format(""), _NET.format(", 0.5"), _NET.format(", p=0.2")),
    healthy=(
        _NET.format(", 0.5, self.training"), _NET.format(", training=self.training"),
        _NET.format(", training=True"),
        _NET.format("").replace("F.dropout(x)", "F.dropout(x) if self.training else x"),
    ),
    mend=mend,
)  # fmt: skip
