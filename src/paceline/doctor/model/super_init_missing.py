"""The ``__init__`` of a module sets layers but does not call that of ``nn.Module``.

This raises "cannot assign module before Module.__init__() call".

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
        lines = node.body.body if isinstance(node.body, cst.IndentedBlock) else ()
        for method in lines:
            if not isinstance(method, cst.FunctionDef) or method.name.value != "__init__":
                continue
            code = facts.code(method)
            is_direct = any(
                re.search(r"^torch\.nn\.Module$", facts.script.meaning(base.value))
                for base in node.bases
            )
            if (
                is_direct
                and "__init__(" not in re.sub(r"def __init__\(", "", code)
                and _sets_layers(facts, method)
            ):
                yield Found(method, f"{node.name.value}.__init__ without super().__init__()")


def _sets_layers(facts: Facts, function: cst.FunctionDef) -> bool:
    """Whether a function assigns a module to an attribute of ``self``."""
    return any(
        binding.name.startswith("self.")
        and isinstance(binding.value, cst.Call)
        and facts.is_module_call(binding.value)
        and facts.script.scope(binding.node) is function
        for binding in facts.script.bindings
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
