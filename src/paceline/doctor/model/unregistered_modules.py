"""A module keeps layers in a plain list or dict.

The module does not register them: its parameters() does not include theirs, so they are not
trained, moved or saved.

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
        code = facts.code(node)
        for binding in facts.script.bindings:
            name, value, scope = binding.name, binding.value, facts.script.scope(binding.node)
            if facts.flow.owner(scope) is not node or not name.startswith("self."):
                continue
            if not isinstance(value, cst.List | cst.ListComp | cst.Dict | cst.DictComp):
                continue
            is_registered = re.search(
                rf"(ModuleList|ModuleDict|Sequential)\(\*?{re.escape(name)}\b|add_module|register_module|setattr",
                code,
            )
            if not is_registered and (
                _holds_layers(facts, value) or _gets_layers(facts, node, name)
            ):
                yield Found(binding.node, f"{name} is a plain {_name(value)} of layers")


def _name(value: cst.BaseExpression) -> str:
    return "dict" if isinstance(value, cst.Dict | cst.DictComp) else "list"


def _holds_layers(facts: Facts, value: cst.BaseExpression) -> bool:
    """Whether a list or dict is written with layers as its elements."""
    elements: list[cst.BaseExpression] = []
    if isinstance(value, cst.List | cst.Dict):
        elements = [element.value for element in value.elements]
    elif isinstance(value, cst.ListComp):
        elements = [value.elt]
    elif isinstance(value, cst.DictComp):
        elements = [value.value]
    return any(_is_layer(facts, element) for element in elements)


def _gets_layers(facts: Facts, node: cst.ClassDef, name: str) -> bool:
    """Whether a layer is appended to this list anywhere in the class."""
    return any(
        facts.code(facts.owner(call)) == name and _is_layer(facts, origin)
        for call in facts.methods("append")
        if facts.flow.owner(facts.script.scope(call)) is node
        for argument in positional(call)
        for origin in facts.flow.origins(argument)
    )


def _is_layer(facts: Facts, constructor: cst.BaseExpression) -> bool:
    """Whether an expression makes a layer with parameters."""
    return (
        isinstance(constructor, cst.Call)
        and facts.is_module_call(constructor)
        and not facts.is_loss_call(constructor)
        and re.search(
            r"Linear|Conv|LSTM|GRU|RNN|Embedding|Norm|Sequential", facts.meaning(constructor)
        )
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
