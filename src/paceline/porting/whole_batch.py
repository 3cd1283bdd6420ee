"""Finds what a loss computes from all samples of a batch together.

    a @ a.T, torch.matmul(images, texts.t()), torch.cdist(x, y)     pairs of samples
    (x - x.mean()) / x.std()                                        statistics over samples
    SupConLoss, NTXentLoss, ...                                     losses that are known by name

Such a loss of a part of the batch is not a part of the loss of the batch. The model itself is not
read: the plan names its batch norms. This module must not know what is said about the result.
"""

import re
from collections.abc import Iterator

import libcst as cst

from .dataflow import Flow
from .loops import Stepping, forward_of, makers_of
from .tree import by_name, positional

_KNOWN = re.compile(
    r"Contrast|SupCon|NT_?Xent|InfoNCE|BarlowTwins|VICReg|C(LIP|lip)Loss|HardTriplet"
)
"""Names of losses that compare the samples of a batch, wherever they are defined."""
_PRODUCTS = ("torch.matmul", "torch.mm")
_DISTANCES = ("torch.cdist", "torch.pdist", "torch.nn.functional.pdist")
_METHODS = ("matmul", "mm")
_SPREADS = ("std", "var")
_SHOWS = ("print", "info", "debug", "log", "add_scalar", "append", "write", "format")
_CONSTANTS = re.compile(r"torch\.(rand|eye|ones|zeros|full|tensor|arange|from_numpy)")
"""What makes a matrix that is no batch."""


def whole_batch(training: Stepping) -> Iterator[cst.BaseExpression]:
    """Yield what the loop, outside its models, computes from all samples of a batch."""
    flow, script = training.flow, training.flow.script
    models = {code for one in training.optimizers.values() for code in training.models(one)}
    read: list[cst.CSTNode] = [training.loop.node.body]
    for node in read:
        for part in script.within(node):
            if isinstance(part, cst.BaseExpression) and _mixes_samples(flow, part):
                yield part
            if not isinstance(part, cst.Call) or script.code(part.func) in models:
                continue
            makers = [script.meaning(one.func) for one in _makers(flow, part)]
            known = [maker for maker in makers if _KNOWN.search(maker.rpartition(".")[2])]
            called = [flow.function_of(part), *(forward_of(flow, maker) for maker in makers)]
            read += [one for one in called if one is not None and one not in read]
            if known and not any(maker in flow.classes for maker in known):
                yield part


def _makers(flow: Flow, call: cst.Call) -> list[cst.Call]:
    """Return the calls that may have made the object which is called here, on whatever device."""
    return [one for one in makers_of(flow, call.func) if isinstance(one, cst.Call)]


def _mixes_samples(flow: Flow, node: cst.BaseExpression) -> bool:
    script = flow.script
    if isinstance(node, cst.BinaryOperation):
        if isinstance(node.operator, cst.MatrixMultiply):
            return _is_of_pairs(flow, node.left, node.right)
        is_normalised = isinstance(node.operator, cst.Divide) and any(
            isinstance(part, cst.Call) and _is_spread_over_samples(part)
            for part in script.within(node.right)
        )
        return is_normalised and not _is_shown(flow, node)
    if not isinstance(node, cst.Call):
        return False
    meaning, given = script.meaning(node.func), positional(node)
    if (
        isinstance(node.func, cst.Attribute)
        and node.func.attr.value in _METHODS
        and len(given) == 1
    ):
        return _is_of_pairs(flow, node.func.value, given[0])
    if meaning in _PRODUCTS and len(given) == 2:
        around = script.parents[script.parents[node]]
        is_traced = isinstance(around, cst.Call) and script.meaning(around.func) == "torch.trace"
        return not is_traced and _is_of_pairs(flow, given[0], given[1])
    return meaning in _DISTANCES


def _is_shown(flow: Flow, node: cst.BaseExpression) -> bool:
    """Whether a value is only printed or logged."""
    calls = [up.func for up in flow.script.up(node) if isinstance(up, cst.Call)]
    return any(flow.script.meaning(call).rpartition(".")[2] in _SHOWS for call in calls)


def _is_of_pairs(flow: Flow, left: cst.BaseExpression, right: cst.BaseExpression) -> bool:
    """Whether a product has a row and a column for each sample: ``a @ b.T``, of no weights."""
    code = flow.script.code(right)
    turned = re.fullmatch(r"(.+)(\.m?T|\.t\(\)|\.transpose\((0, ?1|1, ?0)\))", code, re.DOTALL)
    if turned is None:
        return False
    sides = [turned[1], flow.script.code(left)]
    if any(re.search(r"\bself\.|weight|Parameter|\bW", side) for side in sides):
        return False
    parts = [part for side in (left, right) for part in flow.script.within(side)]
    origins = [one for part in parts if isinstance(part, cst.Name) for one in flow.origins(part)]
    calls = [one for one in (*parts, *origins) if isinstance(one, cst.Call)]
    return not any(_CONSTANTS.match(flow.script.meaning(call.func)) for call in calls)


def _is_spread_over_samples(call: cst.Call) -> bool:
    """Whether this is ``x.std()`` or ``x.var(0)``, over the first dimension or over all."""
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in _SPREADS:
        return False
    is_of_torch = isinstance(call.func.value, cst.Name) and call.func.value.value == "torch"
    given = positional(call)[int(is_of_torch) :] or [*_dims(call)]
    return not given or (isinstance(given[0], cst.Integer) and given[0].value == "0")


def _dims(call: cst.Call) -> Iterator[cst.BaseExpression]:
    named = by_name(call)
    yield from (named[key] for key in ("dim", "axis") if key in named)
