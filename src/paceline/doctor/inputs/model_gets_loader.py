"""A model is called with the loader itself.

A DataLoader is no tensor: the first layer ends in a TypeError.

Fix: call the model with what the loop over the loader gives.
Source: torch.utils.data.DataLoader documentation: it is an iterable over batches.
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.forward_calls():
        for one in positional(call):
            if isinstance(one, cst.Name | cst.Attribute) and facts.loaders_of(one):
                name = facts.code(one)
                inside = _target(facts, call)
                fix = f"write {facts.code(call.func)}({inside})" if inside else ""
                yield Found(call, f"{facts.code(call)} gives the model the loader {name}", fix)


def _target(facts: Facts, call: cst.Call) -> str:
    """What the loop around gives first."""
    for one in facts.script.up(call):
        if isinstance(one, cst.For):
            target = (
                one.target.elements[0].value if isinstance(one.target, cst.Tuple) else one.target
            )
            return facts.code(target)
    return ""


_TEXT = """
import torch
from torch.utils.data import DataLoader
loader = DataLoader(torch.randn(128, 16), batch_size=64)
model = torch.nn.Linear(16, 4)
for batch in loader:
    out = model({})
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_TEXT.format("loader"),),
    healthy=(_TEXT.format("batch"),),
)  # fmt: skip
