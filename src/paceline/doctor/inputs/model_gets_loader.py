"""A model is called with the loader itself.

A DataLoader is not a tensor: the first layer raises a TypeError.

Fix: call the model with the batches from the loop over the loader.
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
        for argument in positional(call):
            if isinstance(argument, cst.Name | cst.Attribute) and facts.loaders_of(argument):
                name = facts.code(argument)
                batch = _target(facts, call)
                fix = f"write {facts.code(call.func)}({batch})" if batch else ""
                yield Found(call, f"{facts.code(call)} passes the model the loader {name}", fix)


def _target(facts: Facts, call: cst.Call) -> str:
    """Return the first loop variable of the loop around a call, or ""."""
    for loop in facts.script.up(call):
        if isinstance(loop, cst.For):
            target = loop.target
            first = target.elements[0].value if isinstance(target, cst.Tuple) else target
            return facts.code(first)
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
