"""What the number of a loop's turn is used for: to show progress, or to compute with.

    if it % 100 == 0, print(it), lr = schedule(it)     shows how far training has come
    batches[it], total += it                           is computed with, or kept

If the number is passed to a function of the script, its uses there are followed, too. This module
must not know how a loop counts.
"""

import re
from collections.abc import Iterator

import libcst as cst

from .dataflow import Flow, parameters

_SAYS = re.compile(r"print|log|lr|schedul|warmup|save|checkpoint")
_TELLS = re.compile(r"write|set_\w+|scalar|\.update$|info|append|evaluate|format|metric|report")
_RATE = re.compile(r"lr\b|learning_rate|rate|warmup|progress|frac")
_DEPTH = 4


def uses(
    flow: Flow, name: str, node: cst.CSTNode, seen: set[cst.CSTNode] | None = None
) -> Iterator[tuple[cst.CSTNode, bool]]:
    """Yield each use of a name in a node, and whether it only shows how far training has come."""
    script, seen = flow.script, set() if seen is None else seen
    seen.add(node)
    for use in script.within(node):
        is_name = isinstance(use, cst.Name | cst.Attribute) and script.code(use) == name
        above = script.parents[use] if is_name else None
        if is_name and not (isinstance(above, cst.AugAssign) and above.target is use):
            yield from _judged(flow, use, seen)


def _judged(
    flow: Flow, use: cst.CSTNode, seen: set[cst.CSTNode]
) -> Iterator[tuple[cst.CSTNode, bool]]:
    """Yield a use with its judgement, and the uses of the parameter that it is passed as.

    Conditions, logs and learning rates only show how far training has come.
    """
    script, child = flow.script, use
    for node in script.up(use):
        if isinstance(node, cst.FormattedString | cst.DictElement | cst.Comparison):
            yield use, True
            return
        if isinstance(node, cst.If | cst.While | cst.IfExp | cst.Assert):
            yield use, child is node.test
            return
        if isinstance(node, cst.Assign | cst.AugAssign):
            target = node.targets[0].target if isinstance(node, cst.Assign) else node.target
            yield use, _RATE.search(script.code(target)) is not None
            return
        if isinstance(node, cst.Call) and isinstance(child, cst.Arg):
            function = flow.function_of(node)
            called = script.code(node.func).lower()
            if _SAYS.search(called) or (function is None and _TELLS.search(called)):
                yield use, True
                return
            parameter = None if function is None else _taken_as(node, child, function)
            if function is not None and parameter is not None and len(seen) < _DEPTH:
                yield from [(use, True), *uses(flow, parameter, function.body, seen)]
                return
        child = node
    yield use, False


def _taken_as(call: cst.Call, given: cst.Arg, function: cst.FunctionDef) -> str | None:
    """Return the parameter that an argument is passed as."""
    if given.keyword is not None:
        return given.keyword.value
    index = list(call.args).index(given)
    names = parameters(function)
    return names[index] if index < len(names) and not given.star else None
