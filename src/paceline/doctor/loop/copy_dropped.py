"""A tensor is moved, but the result is not used.

to() and cuda() return a new tensor; the old one stays where it is. (A module is moved in place.)

Fix: x = x.to(device).
Source: torch.Tensor.to documentation: "returns a copy".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_TENSOR_ATTRIBUTES = {"shape", "dtype", "device", "T", "mT", "H", "mH", "data", "grad", "ndim", "layout",
                      "requires_grad", "is_cuda", "real", "imag", "nbytes", "itemsize"}  # fmt: skip
"""Attributes of a tensor that are read without a call."""


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.methods("to", "cuda"):
        statement = facts.script.parents[call]
        owner = facts.owner(call)
        if (
            isinstance(statement, cst.Expr)
            and isinstance(owner, cst.Name)
            and _is_tensor(facts, owner)
        ):
            name = facts.code(owner)
            yield Found(
                call, f"{facts.code(call)} changes nothing", f"write {name} = {facts.code(call)}"
            )


def _is_tensor(facts: Facts, name: cst.Name) -> bool:
    """Whether a name is a batch of a loader, or a tensor that torch makes."""
    if facts.is_model(name):
        return False
    for loop in facts.script.up(name):
        if isinstance(loop, cst.For) and facts.loaders_of_loop(loop):
            targets = [
                node.value
                for node in facts.script.within(loop.target)
                if isinstance(node, cst.Name)
            ]
            if name.value in targets:
                return not (_is_mapping(facts, name.value, loop) or _is_custom(facts, name, loop))
    origins = facts.flow.origins(name)
    return bool(origins) and all(
        isinstance(origin, cst.Call)
        and re.search(
            r"^torch\.(rand\w*|zeros|ones|tensor|full|empty|arange)$", facts.meaning(origin)
        )
        for origin in origins
    )


def _is_mapping(facts: Facts, name: str, loop: cst.For) -> bool:
    """Whether a batch is a mapping: a tokenizer's moves in place, and a dict has no to()."""
    for node in facts.script.within(loop.body):
        if isinstance(node, cst.Arg) and node.star == "**" and facts.code(node.value) == name:
            return True
        if isinstance(node, cst.Subscript) and facts.code(node.value) == name:
            key = node.slice[0].slice
            if isinstance(key, cst.Index) and isinstance(key.value, cst.SimpleString):
                return True
    return False


def _is_custom(facts: Facts, name: cst.Name, loop: cst.For) -> bool:
    """Whether a whole batch may be an object of another class, whose to() moves in place."""
    if not isinstance(loop.target, cst.Name):
        return False
    is_collated = any(facts.option(loader, "collate_fn") for loader in facts.loaders_of_loop(loop))
    return is_collated or any(
        isinstance(node, cst.Attribute) and facts.code(node.value) == name.value
        and node.attr.value not in _TENSOR_ATTRIBUTES
        and getattr(facts.script.parents[node], "func", None) is not node
        for node in facts.script.within(loop.body)
    )  # fmt: skip


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(["x.to(device)", *STEP[1:]]),
        looped(["x.to(device)", STEP[1], "loss = model(x.float()).mean() / x.shape[0]", *STEP[3:]]).replace("for x, y in", "for x in"),
    ),
    healthy=(
        looped(), looped(["x.to(device)", STEP[1], "loss = model(**x).loss", *STEP[3:]]).replace("for x, y in", "for x in"),
        looped(["x.to(device)", STEP[1], "loss = loss_fn(model(x['ids']), x['labels'])", *STEP[3:]]).replace("for x, y in", "for x in"),
        looped(["x.to(device)", STEP[1], "loss = loss_fn(model(x.ids), x.labels)", *STEP[3:]]).replace("for x, y in", "for x in"),
        looped(["x.to(device)", STEP[1], "loss = model(x)", *STEP[3:]]).replace("for x, y in", "for x in").replace("shuffle=True", "shuffle=True, collate_fn=packed"),
    ),
)  # fmt: skip
