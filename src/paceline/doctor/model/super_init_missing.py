"""A module's ``__init__`` sets layers and does not call that of ``nn.Module``.

It ends in "cannot assign module before Module.__init__() call".

Fix: super().__init__() as its first line.
Source: torch.nn.Module documentation: "an __init__() call to the parent class must be made before assignment".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for node in facts.modules.values():
        rows = node.body.body if isinstance(node.body, cst.IndentedBlock) else ()
        for one in rows:
            if not isinstance(one, cst.FunctionDef) or one.name.value != "__init__":
                continue
            text = facts.code(one)
            is_direct = any(
                re.search(r"^torch\.nn\.Module$", facts.script.meaning(base.value))
                for base in node.bases
            )
            if (
                is_direct
                and "__init__(" not in re.sub(r"def __init__\(", "", text)
                and _sets(facts, one)
            ):
                yield Found(one, f"{node.name.value}.__init__ without super().__init__()")


def _sets(facts: Facts, function: cst.FunctionDef) -> bool:
    return any(
        one.name.startswith("self.")
        and isinstance(one.value, cst.Call)
        and facts.is_module_call(one.value)
        and facts.script.scope(one.node) is function
        for one in facts.script.bindings
    )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=("""
from torch import nn
class Net(nn.Module):
    def __init__(self):
        self.fc = nn.Linear(8, 8)
""",),
    healthy=("""
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
""",),
)  # fmt: skip
