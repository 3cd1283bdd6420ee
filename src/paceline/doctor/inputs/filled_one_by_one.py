"""A batch's tensor is filled number by number.

Each assignment is a call into torch, some microseconds for one number, in a loop that runs for
every sample.

Fix: collect the places in lists, and assign once: x[rows, columns] = 1.0.
Source: PyTorch documentation, torch.Tensor.index_put_; a call's cost is shown by torch.utils.benchmark.
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.dataflow import AnyLoop
from ...porting.tree import by_name, positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_MAKERS = ("torch.zeros", "torch.ones", "torch.empty", "torch.full")


def check(facts: Facts) -> Iterator[Found]:
    named = {facts.code(one) for call in facts.loaders if (one := _collate(call)) is not None}
    for function in (one for one in facts.script.nodes if isinstance(one, cst.FunctionDef)):
        name = function.name.value
        if name not in named and name != "__getitem__" and not name.startswith("collate"):
            continue
        seen: set[cst.CSTNode] = set()
        for node in facts.script.within(function.body):
            loop = _loop_of(facts, node) if isinstance(node, cst.Assign) else None
            if loop is not None and loop not in seen and _fills(facts, node, loop):
                seen.add(loop)
                yield Found(loop, f"{facts.code(node)} is one call for each number")


def _collate(loader: cst.Call) -> cst.BaseExpression | None:
    return by_name(loader).get("collate_fn")


def _loop_of(facts: Facts, node: cst.CSTNode) -> cst.For | None:
    found = next((one for one in facts.script.up(node) if isinstance(one, AnyLoop)), None)
    return found if isinstance(found, cst.For) else None


def _fills(facts: Facts, node: cst.CSTNode, loop: cst.For) -> bool:
    """Whether this gives one number of a tensor, which was made before the loop, a value."""
    target = node.targets[0].target if isinstance(node, cst.Assign) else None
    if not isinstance(target, cst.Subscript) or not isinstance(target.value, cst.Name):
        return False
    places = [one.slice for one in target.slice]
    if not all(isinstance(one, cst.Index) for one in places):
        return False
    inside = set(facts.script.within(loop.body))
    made = facts.flow.origins(target.value)
    dims = {_num_dims(facts, one) for one in made if one not in inside}
    return bool(made) and dims == {len(places)}


def _num_dims(facts: Facts, made: cst.BaseExpression) -> int | None:
    """Of a tensor that is made with sizes; None: the text does not say how many."""
    if not isinstance(made, cst.Call) or facts.meaning(made) not in _MAKERS:
        return None
    sizes = positional(made)
    if facts.has_stars(made) or not sizes:
        return None
    if isinstance(sizes[0], cst.Tuple | cst.List):
        return len(sizes[0].elements)
    return None if facts.meaning(made) == "torch.full" else len(sizes)


_COLLATE = """
import torch
from torch.utils.data import DataLoader
def collate(batch):
    x = torch.zeros(len(batch), 100)
    for i, words in enumerate(batch):
        {}
    return x
loader = DataLoader(texts, batch_size=64, collate_fn=collate)
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(_COLLATE.format("for word in words:\n            x[i, word] = 1.0"),),
    healthy=(
        _COLLATE.format("x[i, words] = 1.0").replace("100)", "100, 2)"),
        _COLLATE.format("x[i, : len(words)] = torch.tensor(words)"),
        _COLLATE.format("x[i] = words"),
    ),
)  # fmt: skip
