"""Layers stand in a plain list or dict of a module.

The module does not know them: its parameters() lack theirs, so they are not trained, moved or
saved.

Fix: nn.ModuleList([...]) or nn.ModuleDict({...}).
Source: torch.nn.ModuleList documentation: "modules it contains are properly registered".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for node in facts.modules.values():
        text = facts.code(node)
        for one in facts.script.bindings:
            scope = facts.script.scope(one.node)
            if facts.flow.owner(scope) is not node or not one.name.startswith("self."):
                continue
            if not isinstance(one.value, cst.List | cst.ListComp | cst.Dict | cst.DictComp):
                continue
            is_known = re.search(
                rf"(ModuleList|ModuleDict|Sequential)\(\*?{re.escape(one.name)}\b|add_module|register_module|setattr",
                text,
            )
            if not is_known and (
                _holds_layers(facts, one.value) or _gets_layers(facts, node, one.name)
            ):
                yield Found(one.node, f"{one.name} is a plain {_name(one.value)} of layers")


def _name(value: cst.BaseExpression) -> str:
    return "dict" if isinstance(value, cst.Dict | cst.DictComp) else "list"


def _holds_layers(facts: Facts, value: cst.BaseExpression) -> bool:
    """Whether its elements themselves are layers with parameters."""
    elements: list[cst.BaseExpression] = []
    if isinstance(value, cst.List | cst.Dict):
        elements = [one.value for one in value.elements]
    elif isinstance(value, cst.ListComp):
        elements = [value.elt]
    elif isinstance(value, cst.DictComp):
        elements = [value.value]
    return any(_is_layer(facts, one) for one in elements)


def _gets_layers(facts: Facts, node: cst.ClassDef, name: str) -> bool:
    """Whether a layer is appended to this list anywhere in the class."""
    return any(
        facts.code(facts.owner(call)) == name and _is_layer(facts, made)
        for call in facts.methods("append")
        if facts.flow.owner(facts.script.scope(call)) is node
        for given in positional(call)
        for made in facts.flow.origins(given)
    )


def _is_layer(facts: Facts, made: cst.BaseExpression) -> bool:
    """Whether this makes a layer with parameters."""
    return (
        isinstance(made, cst.Call)
        and facts.is_module_call(made)
        and not facts.is_loss_call(made)
        and re.search(r"Linear|Conv|LSTM|GRU|RNN|Embedding|Norm|Sequential", facts.meaning(made))
        is not None
    )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=("""
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 8) for _ in range(4)]
""", """
from torch import nn
def block(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = []
        for _ in range(4):
            self.layers.append(block(8))
"""),
    healthy=("""
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = []
        for _ in range(4):
            self.layers.append(nn.Linear(8, 8))
        self.chain = nn.Sequential(*self.layers)
""", """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
""",),
)  # fmt: skip
