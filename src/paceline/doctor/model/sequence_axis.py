"""A recurrent layer with time as its first dimension is read as if the batch came first.

Without batch_first=True its output is (time, batch, features): ``out[:, -1]`` is every time step of
the last sample, and the layer ran along the batch.

Fix: batch_first=True.
Source: torch.nn.LSTM documentation, batch_first: default False.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal

_RECURRENT = re.compile(r"(^|\.)nn\.(LSTM|GRU|RNN)$")
_TRANSPOSES = re.compile(
    r"permute|transpose|swapaxes|rearrange|movedim|\.T\b|\.mT\b|pack_\w+|\.t\("
)


def check(facts: Facts) -> Iterator[Found]:
    for node in facts.modules.values():
        if _TRANSPOSES.search(facts.code(node)):
            continue
        for binding in facts.script.bindings:
            value, scope = binding.value, facts.script.scope(binding.node)
            if facts.flow.owner(scope) is not node or not isinstance(value, cst.Call):
                continue
            name = facts.script.meaning(value.func)
            if not name.startswith("self.") or not _is_time_first(facts, node, name):
                continue
            statement = binding.node
            output = _output_name(facts, statement)
            if output and (read := _read_last(facts, scope, output, statement)) is not None:
                yield Found(read, f"{facts.code(read)}, and {name} is not batch_first")


def _is_time_first(facts: Facts, node: cst.ClassDef, name: str) -> bool:
    """Whether a name of a class is a recurrent layer without ``batch_first=True``."""
    values = [
        binding.value for binding in facts.script.bindings
        if binding.name == name and facts.flow.owner(facts.script.scope(binding.node)) is node
    ]  # fmt: skip
    layer = values[0] if len(values) == 1 else None
    return (
        isinstance(layer, cst.Call)
        and _RECURRENT.search(facts.meaning(layer)) is not None
        and literal(by_name(layer).get("batch_first")) in (None, "False")
        and len([argument for argument in layer.args if argument.keyword is None]) < 5
        and not facts.has_stars(layer)
    )


def _output_name(facts: Facts, statement: cst.CSTNode) -> str:
    """Return the name of the output of ``out, state = self.lstm(x)``, or ""."""
    if not isinstance(statement, cst.Assign):
        return ""
    target = statement.targets[0].target
    if isinstance(target, cst.Tuple) and len(target.elements) == 2:
        return facts.code(target.elements[0].value)
    return ""


def _read_last(
    facts: Facts, scope: cst.CSTNode, name: str, statement: cst.CSTNode
) -> cst.Subscript | None:
    """Return ``out[:, -1]`` after a statement that assigns ``out``, before it is reassigned."""
    order = facts.script.order
    reassigned = [
        order[binding.node] for binding in facts.script.bindings
        if binding.name == name and order[binding.node] > order[statement]
        and facts.script.scope(binding.node) is scope
    ]  # fmt: skip
    for node in facts.script.within(scope):
        if not isinstance(node, cst.Subscript) or order[node] < order[statement]:
            continue
        code = facts.code(node).replace(" ", "")
        is_read = re.fullmatch(rf"{re.escape(name)}\[:,-1(,:)?\]", code) is not None
        reading = order[facts.script.statement(node)]
        if is_read and not any(
            position < order[node] and position != reading for position in reassigned
        ):
            return node
    return None


_NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 32{})
        self.head = nn.Linear(32, 2)
    def forward(self, x):
        {}
        return self.head({})
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        _NET.format("", "out, _ = self.lstm(x)", "out[:, -1]"),
        _NET.format(", num_layers=2", "out, (h, c) = self.lstm(x)", "out[:, -1, :]"),
    ),
    healthy=(
        _NET.format(", batch_first=True", "out, _ = self.lstm(x)", "out[:, -1]"),
        _NET.format("", "out, _ = self.lstm(x)", "out[-1]"),
        _NET.format("", "out, _ = self.lstm(x.transpose(0, 1))", "out.transpose(0, 1)[:, -1]"),
        _NET.format("", "out, _ = self.lstm(x)\n        out = out.permute(1, 0, 2)", "out[:, -1]"),
    ),
)  # fmt: skip
