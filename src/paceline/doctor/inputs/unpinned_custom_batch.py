"""Batches of a custom class are not pinned.

pin_memory=True handles tensors, lists, tuples and dicts; an object without a pin_memory method is
returned unchanged, silently.

Fix: add a method pin_memory(self) that pins its tensors and returns self.
Source: torch.utils.data documentation, "Memory Pinning".
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for loader in facts.loaders:
        collate = by_name(loader).get("collate_fn")
        if collate is None or not facts.flag(loader, "pin_memory"):
            continue
        function = facts.flow.functions.get(facts.code(collate))
        for node in facts.script.within(function.body) if function is not None else ():
            batch = node.value if isinstance(node, cst.Return) else None
            name = facts.meaning(batch) if isinstance(batch, cst.Call) else ""
            class_node = facts.flow.classes.get(name)
            if class_node is None or class_node.bases:
                continue
            if "def pin_memory" not in facts.code(class_node):
                yield Found(loader, f"pin_memory=True does not handle {class_node.name.value}")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=("""
import torch
from torch.utils.data import DataLoader
class Batch:
    def __init__(self, rows):
        self.x = torch.stack(rows)
def collate(rows):
    return Batch(rows)
loader = DataLoader(torch.ones(8, 3), collate_fn=collate, pin_memory=True)
""",),
    healthy=("""
import torch
from torch.utils.data import DataLoader
class Batch:
    def __init__(self, rows):
        self.x = torch.stack(rows)
    def pin_memory(self):
        self.x = self.x.pin_memory()
        return self
def collate(rows):
    return Batch(rows)
loader = DataLoader(torch.ones(8, 3), collate_fn=collate, pin_memory=True)
""",),
)  # fmt: skip
