"""A recurrent layer that takes time first is read as if the batch came first.

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
_TURNS = re.compile(r"permute|transpose|swapaxes|rearrange|movedim|\.T\b|\.mT\b|pack_\w+|\.t\(")


def check(facts: Facts) -> Iterator[Found]:
    for node in facts.modules.values():
        if _TURNS.search(facts.code(node)):
            continue
        for binding in facts.script.bindings:
            value, scope = binding.value, facts.script.scope(binding.node)
            if facts.flow.owner(scope) is not node or not isinstance(value, cst.Call):
                continue
            name = facts.script.meaning(value.func)
            if not name.startswith("self.") or not _is_time_first(facts, node, name):
                continue
            statement = binding.node
            first = _first(facts, statement)
            if first and (read := _read_last(facts, scope, first, statement)) is not None:
                yield Found(read, f"{facts.code(read)}, and {name} is not batch_first")


def _is_time_first(facts: Facts, node: cst.ClassDef, name: str) -> bool:
    made = [
        one.value for one in facts.script.bindings
        if one.name == name and facts.flow.owner(facts.script.scope(one.node)) is node
    ]  # fmt: skip
    return len(made) == 1 and isinstance(made[0], cst.Call) and (
        _RECURRENT.search(facts.meaning(made[0])) is not None
        and literal(by_name(made[0]).get("batch_first")) in (None, "False")
        and "batch_first" not in {one for one in by_name(made[0]) if one != "batch_first"}
        and len([one for one in made[0].args if one.keyword is None]) < 5
        and not facts.has_stars(made[0])
    )  # fmt: skip


def _first(facts: Facts, statement: cst.CSTNode) -> str:
    """The name of the output of ``out, state = self.lstm(x)``."""
    if not isinstance(statement, cst.Assign):
        return ""
    target = statement.targets[0].target
    if isinstance(target, cst.Tuple) and len(target.elements) == 2:
        return facts.code(target.elements[0].value)
    return ""


def _read_last(
    facts: Facts, scope: cst.CSTNode, name: str, statement: cst.CSTNode
) -> cst.Subscript | None:
    """``out[:, -1]`` behind the statement, of this very output."""
    order = facts.script.order
    anew = [
        order[one.node] for one in facts.script.bindings
        if one.name == name and order[one.node] > order[statement]
        and facts.script.scope(one.node) is scope
    ]  # fmt: skip
    for one in facts.script.within(scope):
        if not isinstance(one, cst.Subscript) or order[one] < order[statement]:
            continue
        text = facts.code(one).replace(" ", "")
        is_read = re.fullmatch(rf"{re.escape(name)}\[:,-1(,:)?\]", text) is not None
        if is_read and not any(place < order[one] and _other(facts, place, one) for place in anew):
            return one
    return None


def _other(facts: Facts, place: int, read: cst.Subscript) -> bool:
    """Whether the statement at a place is another than the one that reads."""
    return facts.script.order[facts.script.statement(read)] != place


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
