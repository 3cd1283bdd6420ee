"""A batch's tensor is filled one number at a time.

Each assignment is a call into torch, some microseconds for one number, in a loop that runs for
every sample.

Fix: collect the indices in lists, and assign once: x[rows, columns] = 1.0.
Source: PyTorch documentation, torch.Tensor.index_put_; a call's cost is shown by torch.utils.benchmark.
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.dataflow import AnyLoop
from ...porting.tree import by_name, positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_FACTORIES = ("torch.zeros", "torch.ones", "torch.empty", "torch.full")


def check(facts: Facts) -> Iterator[Found]:
    collating = {
        facts.code(collate_fn)
        for loader in facts.loaders
        if (collate_fn := by_name(loader).get("collate_fn")) is not None
    }
    for function in (node for node in facts.script.nodes if isinstance(node, cst.FunctionDef)):
        name = function.name.value
        if name not in collating and name != "__getitem__" and not name.startswith("collate"):
            continue
        seen: set[cst.CSTNode] = set()
        for node in facts.script.within(function.body):
            loop = _loop_of(facts, node) if isinstance(node, cst.Assign) else None
            if loop is not None and loop not in seen and _fills(facts, node, loop):
                seen.add(loop)
                yield Found(loop, f"{facts.code(node)} is one call for each number")


def _loop_of(facts: Facts, node: cst.CSTNode) -> cst.For | None:
    """Return the innermost loop around a node if it is a ``for`` loop, or None."""
    loop = next((outer for outer in facts.script.up(node) if isinstance(outer, AnyLoop)), None)
    return loop if isinstance(loop, cst.For) else None


def _fills(facts: Facts, node: cst.CSTNode, loop: cst.For) -> bool:
    """Whether a statement sets one number of a tensor that was made before the loop."""
    target = node.targets[0].target if isinstance(node, cst.Assign) else None
    if not isinstance(target, cst.Subscript) or not isinstance(target.value, cst.Name):
        return False
    indices = [element.slice for element in target.slice]
    if not all(isinstance(index, cst.Index) for index in indices):
        return False
    nodes = set(facts.script.within(loop.body))
    origins = facts.flow.origins(target.value)
    ranks = {_num_dims(facts, origin) for origin in origins if origin not in nodes}
    return bool(origins) and ranks == {len(indices)}


def _num_dims(facts: Facts, factory: cst.BaseExpression) -> int | None:
    """Return the number of dimensions of a tensor made with sizes, or None if unknown."""
    if not isinstance(factory, cst.Call) or facts.meaning(factory) not in _FACTORIES:
        return None
    sizes = positional(factory)
    if facts.has_stars(factory) or not sizes:
        return None
    if isinstance(sizes[0], cst.Tuple | cst.List):
        return len(sizes[0].elements)
    return None if facts.meaning(factory) == "torch.full" else len(sizes)


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
